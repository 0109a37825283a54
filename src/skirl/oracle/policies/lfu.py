"""Least frequently used, by batches: for comparison with MIN. A row that comes back is counted from zero."""

import numpy as np

from skirl.oracle.policies.smallest import smallest


class LFU:
    """Evicts the row used in the fewest batches since it came; ties by least recent use."""

    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        self._count = np.zeros(capacity, np.int64)
        """For each slot: batches that used its row since it came; 0: there is no row."""
        self._clock = np.zeros(capacity, np.int64)
        self._time = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Do nothing: the future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return the least used of all resident rows outside the batch."""
        if not count:
            return np.empty(0, np.int32)
        resident = self._count > 0
        resident[batch[batch >= 0]] = False
        candidates = np.flatnonzero(resident)
        chosen = smallest(count, self._count[candidates], self._clock[candidates])
        victims = candidates[chosen].astype(np.int32)
        self._count[victims] = 0
        return victims

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Count one more batch for these rows."""
        self._count[slots] += 1
        self._clock[slots] = self._time + np.arange(len(slots))
        self._time += len(slots)
