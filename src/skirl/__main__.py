"""`python -m skirl` is the command."""

import sys

from skirl.cli import main

if __name__ == "__main__":
    sys.exit(main())
