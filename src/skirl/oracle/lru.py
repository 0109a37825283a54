"""Least recently used, by batches: for comparison with MIN, which fetches 1.3 to 2 times less on traces.

Rows of one batch are ordered by their last position in it, as the usual definition of LRU on a stream of ids has it.
"""

import numpy as np
from numba import njit

from skirl.oracle.entries import Entries
from skirl.oracle.lists import Links, append, unlink


class LRU:
    """The row whose last use is oldest leaves."""

    def __init__(self, entries: Entries, depth: int) -> None:
        self._entries = entries
        self._links = Links(entries, 1)

    def entered(self, entries: np.ndarray, number: int) -> None:
        """The future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """From the oldest, passing over the batch's own rows."""
        self._links.fit()
        out = np.empty(count, np.int32)
        links, columns = self._links, self._entries.columns
        _pin(batch, columns.slot, links.after, links.before, links.head, links.tail)
        _evict(out, links.after, links.before, links.head, links.tail)
        return out

    def used(self, entries: np.ndarray, next_uses: np.ndarray, number: int) -> None:
        """The batch's rows are the most recent now."""
        self._links.fit()
        links = self._links
        _touch(entries, links.after, links.before, links.head, links.tail)


@njit(nogil=True, cache=True)
def _linked(after, before, head, entry):
    return head[0] == entry or before[entry] >= 0


@njit(nogil=True, cache=True)
def _pin(batch, slot, after, before, head, tail):
    for entry in batch:
        if slot[entry] >= 0:
            unlink(after, before, head, tail, 0, entry)
            append(after, before, head, tail, 0, entry)


@njit(nogil=True, cache=True)
def _touch(entries, after, before, head, tail):
    for entry in entries:
        if _linked(after, before, head, entry):
            unlink(after, before, head, tail, 0, entry)
        append(after, before, head, tail, 0, entry)


@njit(nogil=True, cache=True)
def _evict(out, after, before, head, tail):
    for i in range(len(out)):
        entry = head[0]
        unlink(after, before, head, tail, 0, entry)
        before[entry] = after[entry] = -1
        out[i] = entry
