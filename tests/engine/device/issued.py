"""Records the work that each trainer's loop issues to its streams and to the other trainers, in order."""

import threading
from collections.abc import Callable
from typing import Any

from skirl.engine.device.streams import Streams
from skirl.peers.base import ON_DEVICE


class Issued:
    """One list for each thread that made streams: each is a trainer's loop."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[str, str, Any]]] = {}
        self.elsewhere: list[str] = []
        """Calls from other threads."""

    def noted(self, streams: Streams) -> Streams:
        log = self.of.setdefault(threading.get_ident(), [])
        events: dict[int, tuple[str, int, Any]] = {}
        return Streams(
            Noted(streams.compute, "compute", log, events), streams.inward, streams.outward,
            Noted(streams.aside, "aside", log, events),
        )  # fmt: skip

    def call(self, rank: int, doing: str) -> None:
        if any(doing.startswith(f"channel {name}, ") for name in ON_DEVICE):
            log = self.of.get(threading.get_ident())
            self.elsewhere.append(doing) if log is None else log.append(("call", doing, rank))

    def check(self) -> None:
        """Check that all trainers issue the same calls in the same order, and that each stream waits for what it needs
        of the other."""
        calls = [[doing for what, doing, _ in log if what == "call"] for log in self.of.values()]
        assert len(calls) > 1 and all(each == calls[0] for each in calls), calls
        assert not self.elsewhere
        assert any("late gradients" in doing for doing in calls[0]) and any(
            "early values" in doing for doing in calls[0]
        )
        for log in self.of.values():
            _check_waits(log)


def _check_waits(log: list[tuple[str, str, Any]]) -> None:
    done, seen = {"compute": 0, "aside": 0}, {"compute": 0, "aside": 0}
    sent = 0
    """Items of work on the loop's stream up to the values of the step in the loop."""
    for what, name, fact in log:
        if what == "work":
            done[name] += 1
            assert name == "compute" or seen["aside"] >= sent, "work aside that does not wait for the step before"
        elif what == "wait":
            seen[name] = max(seen[name], fact)
        elif "(values of rows)" in name:
            assert seen["compute"] == done["aside"], "a step is loaded before what was moved aside is there"
            sent = done["compute"]


class Noted:
    """A stream that records its work and its waits. Of events, only those of the other recorded stream count."""

    def __init__(self, stream: Any, name: str, log: list, events: dict[int, tuple[str, int, Any]]) -> None:
        self._stream, self._name, self._log, self._events = stream, name, log, events

    def run(self, work: Callable[[], None]) -> None:
        self._log.append(("work", self._name, None))
        self._stream.run(work)

    def now(self, work: Callable[[], Any]) -> Any:
        self._log.append(("work", self._name, None))
        return self._stream.now(work)

    def record(self) -> Any:
        event = self._stream.record()
        count = sum(what == "work" and name == self._name for what, name, _ in self._log)
        self._events[id(event)] = self._name, count, event
        return event

    def wait(self, event: Any) -> None:
        name, count, _ = self._events.get(id(event), (self._name, 0, None))
        if name != self._name:
            self._log.append(("wait", self._name, count))
        self._stream.wait(event)

    def keep(self, tensor: Any) -> None:
        self._stream.keep(tensor)
