"""`python -m seqreg`: the same as the `seqreg` command."""

from seqreg.cli.main import main

if __name__ == "__main__":
    main()
