"""Runs the command `skirl`."""

import atexit
import os
import sys


def run() -> None:
    """Run the command, and end without freeing what torch has made, which takes more than a second."""
    code = 1  # of a traceback

    @atexit.register  # as the first, it runs last
    def leave() -> None:
        sys.stdout.flush()
        os._exit(code)

    from skirl.cli import main

    code = main()
    sys.exit(code)


if __name__ == "__main__":
    run()
