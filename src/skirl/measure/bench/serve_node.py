"""Memory nodes as benchmarks need them: over torch's default transports, or forked from a process that has imported all."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Self

from skirl.measure.bench.nodes import forked
from skirl.store.remote import group, part
from skirl.store.remote.address import Address
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.node import TICK, Node


def torchs_own(pipe: Any, numbers: Any, task: part.Task) -> None:
    """A part that talks over torch's default transports."""
    group.TRANSPORTS.clear()
    part.run(pipe, numbers, task)


def serve(words: list[str], **more: Any) -> int:
    """Serve until killed, or until the meeting point is gone.

    **Arguments**

    - `words`: those of `skirl serve`.
    - `more`: of the node.
    """
    address, given = Address.meeting(words[0]), dict(zip(words[1::2], words[2::2]))
    patience, number = float(given["--patience"]), int(given["--node"])
    meeting = Meeting(address, keep=number == 0, seconds=patience)
    node = Node(meeting, number, int(given["--nodes"]), rows=given["--rows"], patience=patience, **more)
    try:
        while True:
            node.tick()
            time.sleep(TICK)
    finally:
        node.kill()


class Forked:
    """A node that is forked from this process, which has no threads; it can be asked what a `subprocess.Popen` can.

    **Arguments**

    - `words`: what would stand behind `python`.
    - `log`: the file for what it says.
    """

    def __init__(self, words: list[str], log: Path | None) -> None:
        self._code: int | None = None
        self.pid = forked(lambda: serve(words, begun="fork"), log)

    @classmethod
    def start(cls, words: list[str], log: Path | None) -> Self:
        """Begin a node."""
        return cls(words[3:], log)  # behind `-m skirl serve`

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve(sys.argv[1:], body=torchs_own)
