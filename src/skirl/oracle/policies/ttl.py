"""BagPipe's rule, for comparison: a row stays until the last batch of the window that uses it, its time to live. That is
set when a batch that uses the row is planned; batches that enter later do not extend it. Expired rows leave every
quarter of the window; if the live ones do not fit, those that would live longest leave."""

import numpy as np

from skirl.oracle.policies.lfu import smallest

_EXPIRED = 1 << 40
_NOBODY = -(1 << 40)
"""Marks a slot without a row."""


class TTL:
    """Evicts expired rows at every clean-up. If room is short, expired rows leave first, then those that live longest."""

    wants_last = True

    def __init__(self, capacity: int, depth: int) -> None:
        self._interval = max(1, depth // 4)
        self._until = np.full(capacity, _NOBODY, np.int64)
        self._clock = np.zeros(capacity, np.int64)
        self._time = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Do nothing: `used` sets the time to live."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return all expired rows at a clean-up, otherwise as many as are needed."""
        cleans = number % self._interval == 0
        if not count and not cleans:
            return np.empty(0, np.int32)
        resident = self._until > _NOBODY
        resident[batch[batch >= 0]] = False
        candidates = np.flatnonzero(resident)
        until = self._until[candidates]
        expired = until < number
        if cleans:
            count = max(count, int(expired.sum()))
        worth = np.where(expired, until - _EXPIRED, -until)
        victims = candidates[smallest(count, worth, self._clock[candidates])].astype(np.int32)
        self._until[victims] = _NOBODY
        return victims

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Let these rows live until the last batch that uses them in the window as it is now."""
        assert last is not None
        self._until[slots] = last
        self._clock[slots] = self._time + np.arange(len(slots))
        self._time += len(slots)
