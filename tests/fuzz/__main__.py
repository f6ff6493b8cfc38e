"""`python -m tests.fuzz`: a module of its own, so that forked processes do not import the generator again."""

import sys

from tests.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
