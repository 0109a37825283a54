"""Runs the command `skirl`."""

import atexit
import os
import sys


def run() -> None:
    """Run the command. If all went well, end without freeing what torch has made, which takes more than a second; other
    ranks may still ask one that failed why."""
    code = 1

    @atexit.register  # as the first, it runs last
    def leave() -> None:
        if code == 0:
            os._exit(0)

    from skirl.cli import main

    code = main()
    sys.exit(code)


if __name__ == "__main__":
    run()
