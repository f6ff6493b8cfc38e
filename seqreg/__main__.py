"""The command `seqreg`, also as `python -m seqreg`."""

from __future__ import annotations

import sys

from seqreg.errors import MissingExtraError


def main() -> None:
    """Run the command, or say in one line what to install first."""
    try:
        from seqreg.cli.main import main as run
    except MissingExtraError as error:
        print(f"seqreg: {error}", file=sys.stderr)
        sys.exit(error.code)
    run()


if __name__ == "__main__":
    main()
