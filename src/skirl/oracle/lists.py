"""Linked lists through entries: each resident row is in one list, and leaves its middle in constant time.

Two int32 links an entry. A heap by next use would cost a logarithm and a comparison chain for every use; a list a batch
needs neither, because all rows of one list share their next use.
"""

import numpy as np
from numba import njit

from skirl.oracle.entries import Entries


class Links:
    """Forward and backward links of every entry, and the ends of every list."""

    def __init__(self, entries: Entries, lists: int) -> None:
        self._entries = entries
        self.after = np.full(entries.size, -1, np.int32)
        self.before = np.full(entries.size, -1, np.int32)
        self.head = np.full(lists, -1, np.int32)
        self.tail = np.full(lists, -1, np.int32)

    def fit(self) -> None:
        """Follow the entries when they have grown."""
        size = self._entries.size
        if len(self.after) < size:
            for name in ("after", "before"):
                grown = np.full(size, -1, np.int32)
                old = getattr(self, name)
                grown[: len(old)] = old
                setattr(self, name, grown)


@njit(nogil=True, cache=True)
def append(after, before, head, tail, which, entry):
    """Put an entry at the end of a list."""
    last = tail[which]
    before[entry] = last
    after[entry] = -1
    if last < 0:
        head[which] = entry
    else:
        after[last] = entry
    tail[which] = entry


@njit(nogil=True, cache=True)
def unlink(after, before, head, tail, which, entry):
    """Take an entry out of the list it is in."""
    left, right = before[entry], after[entry]
    if left < 0:
        head[which] = right
    else:
        after[left] = right
    if right < 0:
        tail[which] = left
    else:
        before[right] = left
