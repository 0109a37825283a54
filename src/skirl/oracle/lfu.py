"""Least frequently used, by batches: for comparison. Counts start anew when a row is brought in.

Victims are picked by one selection among all resident rows a step: O(capacity), 0.8 ms more than LRU at 31,489 slots.
Frequency buckets would be O(1) a use and three times the code, for a policy that nobody should train with.
"""

import numpy as np

from skirl.oracle.entries import Entries
from skirl.oracle.smallest import smallest


class LFU:
    """The row used in the fewest batches since it came leaves; ties by least recent use."""

    def __init__(self, entries: Entries, depth: int) -> None:
        self._entries = entries
        self._count = np.zeros(entries.size, np.int64)

    def entered(self, entries: np.ndarray, number: int) -> None:
        """The future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """The least used of all residents outside the batch."""
        if not count:
            return np.empty(0, np.int32)
        self._fit()
        columns = self._entries.columns
        resident = columns.slot >= 0
        resident[batch] = False
        candidates = np.flatnonzero(resident)
        chosen = smallest(count, self._count[candidates], columns.clock[candidates])
        victims = candidates[chosen].astype(np.int32)
        self._count[victims] = 0
        return victims

    def used(self, entries: np.ndarray, next_uses: np.ndarray, number: int) -> None:
        """One more batch used these rows."""
        self._fit()
        self._count[entries] += 1

    def _fit(self) -> None:
        if len(self._count) < self._entries.size:
            grown = np.zeros(self._entries.size, np.int64)
            grown[: len(self._count)] = self._count
            self._count = grown
