"""Belady's MIN by batches, inside the window: the victim is the row whose next batch is farthest.

Rows of unknown future come first, the least recently used before the others: outside the window MIN degrades to LRU, and
so it never fetches more than LRU does. All rows with the same next batch share a list, so a use costs two link updates
(about 4 ns) and a victim one; a heap would cost 20 comparisons a use at a million rows.
"""

import numpy as np
from numba import njit

from skirl.oracle.entries import NEVER, Entries
from skirl.oracle.lists import Links, append, unlink


class Minimum:
    """Farthest next batch first; ties and unknown futures by least recent use."""

    def __init__(self, entries: Entries, depth: int) -> None:
        self._entries = entries
        self._size = 16  # lists: grows to the farthest batch known, whatever depth allows
        self._links = Links(entries, self._size + 1)  # the last list: unknown futures
        self._sorted = np.ones(self._size, np.bool_)
        self._now = 0
        self._farthest = 0

    def entered(self, entries: np.ndarray, number: int) -> None:
        """Rows of unknown future move to the list of the batch that uses them."""
        self._reach(number)
        links = self._links
        which = number & (self._size - 1)
        _move(entries, links.after, links.before, links.head, links.tail, self._size, which)
        if len(entries):
            self._sorted[which] = False  # in order of the new batch, not of last use
            self._farthest = max(self._farthest, number)

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Unknown futures from the least recently used, then the farthest batches."""
        self._reach(number)
        out = np.empty(count, np.int32)
        if count:
            links, columns = self._links, self._entries.columns
            self._farthest = _evict(
                out,
                columns.clock,
                links.after,
                links.before,
                links.head,
                links.tail,
                self._sorted,
                self._farthest,
                number,
            )
        return out

    def used(self, entries: np.ndarray, next_uses: np.ndarray, number: int) -> None:
        """Every row of the batch moves on to the list of its next batch."""
        farthest = _last_known(next_uses)
        self._reach(farthest)
        self._farthest = max(self._farthest, farthest)
        self._links.fit()
        links = self._links
        # The rows that waited for this batch are exactly those of its list: they all move, so the list is dropped whole.
        which = number & (self._size - 1)
        links.head[which] = links.tail[which] = -1
        self._sorted[which] = True
        self._now = number + 1
        _use(entries, next_uses, links.after, links.before, links.head, links.tail, self._size)

    def _reach(self, number: int) -> None:
        """Have a list for every batch from now to `number`."""
        self._links.fit()
        if number - self._now < self._size - 1:
            return
        size = self._size
        while number - self._now >= size - 1:
            size *= 2
        batches = np.arange(self._now, self._now + self._size - 1)
        old, new = batches & (self._size - 1), batches & (size - 1)
        for name in ("head", "tail"):
            ends = getattr(self._links, name)
            grown = np.full(size + 1, -1, np.int32)
            grown[new], grown[size] = ends[old], ends[self._size]
            setattr(self._links, name, grown)
        grown = np.ones(size, np.bool_)
        grown[new] = self._sorted[old]
        self._sorted, self._size = grown, size


@njit(nogil=True, cache=True)
def _last_known(next_uses):
    last = -1
    for use in next_uses:
        if use != NEVER and use > last:
            last = use
    return last


@njit(nogil=True, cache=True)
def _move(entries, after, before, head, tail, source, target):
    for entry in entries:
        unlink(after, before, head, tail, source, entry)
        append(after, before, head, tail, target, entry)


@njit(nogil=True, cache=True)
def _use(entries, next_uses, after, before, head, tail, size):
    for i in range(len(entries)):
        which = size if next_uses[i] == NEVER else next_uses[i] & (size - 1)
        append(after, before, head, tail, which, entries[i])


@njit(nogil=True, cache=True)
def _evict(out, clock, after, before, head, tail, is_sorted, farthest, number):
    """Fill `out`; return the farthest batch that may still have rows waiting."""
    size = len(head) - 1
    taken = 0
    while taken < len(out) and head[size] >= 0:
        out[taken] = head[size]
        unlink(after, before, head, tail, size, head[size])
        taken += 1
    while taken < len(out):
        if farthest <= number:
            raise RuntimeError("more victims asked for than rows are resident outside the batch")
        which = farthest & (size - 1)
        if head[which] < 0:
            farthest -= 1
            continue
        if not is_sorted[which]:
            _sort(which, clock, after, before, head, tail)
            is_sorted[which] = True
        out[taken] = head[which]
        unlink(after, before, head, tail, which, head[which])
        taken += 1
    return farthest


@njit(nogil=True, cache=True)
def _sort(which, clock, after, before, head, tail):
    """Order one list by last use."""
    count = 0
    entry = head[which]
    while entry >= 0:
        count += 1
        entry = after[entry]
    members = np.empty(count, np.int32)
    entry = head[which]
    for i in range(count):
        members[i] = entry
        entry = after[entry]
    members = members[np.argsort(clock[members])]
    head[which] = tail[which] = -1
    for entry in members:
        append(after, before, head, tail, which, entry)
