"""Records what each trainer's loop issues to the other trainers for a device, in order."""

import threading

from skirl.engine.device.transfers import Streams
from skirl.peers.base import ON_DEVICE


class Issued:
    """One list for each thread that made streams: each is a trainer's loop."""

    def __init__(self) -> None:
        self.of: dict[int, list[str]] = {}
        self.elsewhere: list[str] = []
        """Calls from other threads."""

    def noted(self, streams: Streams) -> Streams:
        self.of.setdefault(threading.get_ident(), [])
        return streams

    def call(self, rank: int, doing: str) -> None:
        if any(doing.startswith(f"channel {name}, ") for name in ON_DEVICE):
            self.of.get(threading.get_ident(), self.elsewhere).append(doing)

    def check(self) -> None:
        first, *others = self.of.values()
        assert others and first and all(each == first for each in others), self.of
        assert not self.elsewhere
