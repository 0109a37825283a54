"""Memory nodes for benchmarks: with torch's default transports, or forked from a process that has imported everything."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Self

from skirl.measure.bench.nodes import forked
from skirl.store.remote import group, part
from skirl.store.remote.meeting import Meeting
from skirl.store.remote.node import TICK, Node
from skirl.store.remote.wire import Address


def torchs_own(pipe: Any, numbers: Any, task: part.PartFacts) -> None:
    """Run a part that talks over torch's default transports."""
    group.TRANSPORTS.clear()
    part.run(pipe, numbers, task)


def serve(words: list[str], **more: Any) -> int:
    """Serve until killed, or until the meeting point is gone.

    **Arguments**

    - `words`: the arguments of `skirl serve`.
    - `more`: further arguments of the node.
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


class ForkedNode:
    """A node forked from this process, which must have no other threads. Offers what is used of `subprocess.Popen`.

    **Arguments**

    - `words`: the arguments of `skirl serve`.
    - `log`: the file for its output.
    """

    def __init__(self, words: list[str], log: Path | None) -> None:
        self._code: int | None = None
        self.pid = forked(lambda: serve(words, begun="fork"), log)

    @classmethod
    def start(cls, words: list[str], log: Path | None) -> Self:
        """Start a node. words: the arguments of `python`."""
        return cls(words[3:], log)  # without `-m skirl serve`

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        """Wait until it ends and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    serve(sys.argv[1:], body=torchs_own)
