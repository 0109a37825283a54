"""Least frequently used, by batches: for comparison with MIN. A row that comes back is counted from zero."""

import numpy as np


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


def smallest(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the indices of the `count` smallest by `first`, ties by `second`, in this order; all, if there are fewer.

    >>> smallest(3, np.array([5, 1, 5, 5]), np.array([3, 0, 2, 1])).tolist()
    [1, 3, 2]
    """
    if not 0 < count < len(first):
        chosen = np.arange(len(first) if count else 0)
        return chosen[np.lexsort((second[chosen], first[chosen]))]
    bound = np.partition(first, count - 1)[count - 1]
    below, tied = np.flatnonzero(first < bound), np.flatnonzero(first == bound)
    room = count - len(below)
    if room < len(tied):
        tied = tied[np.argpartition(second[tied], room - 1)[:room]]
    chosen = np.concatenate([below, tied])
    return chosen[np.lexsort((second[chosen], first[chosen]))]
