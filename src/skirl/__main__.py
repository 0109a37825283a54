"""Runs the command `skirl` for `python -m skirl`."""

import sys

from skirl.cli import main

if __name__ == "__main__":
    sys.exit(main())
