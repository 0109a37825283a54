"""Eviction policies: which resident rows leave when a batch needs room. They see slots, never keys. MIN is in `minimum`;
beside it LRU, LFU and BagPipe's time to live, to compare it with. Ties leave by least recent use, where the rows of a
batch count in the order of their last position in it."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from skirl.oracle.policies.minimum import Minimum


class Policy(Protocol):
    wants_last: bool
    """True if `used` needs the last batch of the window that uses each row."""

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Batch `number` entered the window. These resident rows, whose next use was unknown, have one now."""
        ...

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return at least `count` slots whose rows leave for batch `number`, none of those in `batch` (< 0: none)."""
        ...

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Batch `number` was planned and used these rows, in this order of recency. `last` is None unless wanted."""
        ...


class LRU:
    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        self._clock = np.full(capacity, -1, np.int64)
        """[slots]: when the row was last used; -1: there is no row."""
        self._time = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """The future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        resident = self._clock >= 0
        resident[batch[batch >= 0]] = False
        others = np.flatnonzero(resident)
        count, order = self._ordered(count, others, number)
        victims = others[np.lexsort((self._clock[others], order))[:count]].astype(np.int32)
        self._clock[victims] = -1
        return victims

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        self._clock[slots] = self._time + np.arange(len(slots))
        self._time += len(slots)

    def _ordered(self, count: int, others: np.ndarray, number: int) -> tuple[int, np.ndarray]:
        """Return how many leave, and numbers of which the smallest leave first; ties by least recent use."""
        return count, self._clock[others]


class LFU(LRU):
    """Evicts the row used in the fewest batches since it came."""

    def __init__(self, capacity: int, depth: int) -> None:
        super().__init__(capacity, depth)
        self._count = np.zeros(capacity, np.int64)

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        victims = super().evict(count, batch, number)
        self._count[victims] = 0
        return victims

    def _ordered(self, count: int, others: np.ndarray, number: int) -> tuple[int, np.ndarray]:
        return count, self._count[others]

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        super().used(slots, next_uses, number, last)
        self._count[slots] += 1


class TTL(LRU):
    """A row lives until the last batch that uses it in the window of the batch that used it last. Expired rows leave every
    quarter of the window; if the live ones do not fit, those that would live longest leave."""

    wants_last = True

    def __init__(self, capacity: int, depth: int) -> None:
        super().__init__(capacity, depth)
        self._interval = max(1, depth // 4)
        self._until = np.zeros(capacity, np.int64)

    def _ordered(self, count: int, others: np.ndarray, number: int) -> tuple[int, np.ndarray]:
        until = self._until[others]
        expired = until < number
        if number % self._interval == 0:
            count = max(count, int(expired.sum()))
        return count, np.where(expired, until - (1 << 40), -until)

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        super().used(slots, next_uses, number, last)
        assert last is not None
        self._until[slots] = last


POLICIES: dict[str, Callable[[int, int], Policy]] = {"lfu": LFU, "lru": LRU, "min": Minimum, "ttl": TTL}
"""By name. Each takes the number of slots, and the depth of the window."""
