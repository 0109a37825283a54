"""Work out which rows should leave when, by searching every resident row and every batch of the window."""

from collections.abc import Sequence
from math import inf

Batch = Sequence[int]
"""The keys of a batch, one for each position."""


class Residents:
    """One bank of a cache, by the promise: its rows, and when each was last used."""

    def __init__(self, capacity: int, policy: str = "min") -> None:
        self.capacity = capacity
        self.policy = policy
        self._last_use: dict[int, int] = {}
        self._clock = 0

    def run(self, batches: Sequence[Batch], windows: Sequence[int], executed: int) -> list[set[int]]:
        """Return the rows that leave for each of the first `executed` batches; batch t sees `windows[t]` batches,
        itself included."""
        return [self._step(batches[t : t + windows[t]]) for t in range(executed)]

    def _step(self, window: Sequence[Batch]) -> set[int]:
        # A row's last use is its last position, within its table.
        batch = dict.fromkeys(sorted(dict.fromkeys(reversed(window[0])), key=lambda key: key >> 48, reverse=True))
        others = [key for key in self._last_use if key not in batch]
        need = len(others) + len(batch) - self.capacity
        leaving = sorted(others, key=lambda key: self._rank(key, window))[: max(0, need)]
        for key in leaving:
            del self._last_use[key]
        for key in reversed(batch):
            self._clock += 1
            self._last_use[key] = self._clock
        return set(leaving)

    def _rank(self, key: int, window: Sequence[Batch]) -> tuple[float, int]:
        upcoming = inf
        if self.policy == "min":
            upcoming = next((i for i, batch in enumerate(window) if key in batch), inf)
        return -upcoming, self._last_use[key]


def windows(depth: int | str, count: int, ramp: bool) -> list[int]:
    """Return how many batches are known when each of `count` is planned."""
    if depth == "epoch":
        return [count] * count
    assert isinstance(depth, int)
    return [min(depth, 2 * t + 8) if ramp else depth for t in range(count)]
