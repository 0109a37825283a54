"""Belady's MIN by batches, inside the window: the victim is the row whose next batch is farthest.

Rows of unknown future come first, the least recently used before the others: outside the window MIN degrades to LRU, and
so it never fetches more than LRU does. They wait in a queue, in the order of their last use; a row that the window calls
after all leaves a gap there. Rows with the same next batch share a list. So a use costs two writes and a victim one read; a
heap would cost 20 comparisons a use at a million rows, and links through the queue a chain of reads, each waiting for the
one before.
"""

import numpy as np

from skirl.jit import kernel
from skirl.oracle.moves import NEVER


class Minimum:
    """Farthest next batch first; ties and unknown futures by least recent use."""

    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        # Rows of unknown future: slots in order, and of each slot its place there. Where that says otherwise is a gap.
        self._queue = np.empty(2 * capacity + 1, np.int32)
        self._place = np.full(capacity, -1, np.int32)
        self._begin = self._end = 0
        # Rows of known future: a list for each batch from now on, in a ring that grows to the farthest batch known.
        self._size = 16
        self._after = np.empty(capacity, np.int32)
        self._head = np.full(self._size, -1, np.int32)
        self._tail = np.full(self._size, -1, np.int32)
        self._called = np.zeros(self._size, np.int32)
        """Of each list: how many slots at its head came out of the queue, in the order of the batch that called them."""
        self._now = 0
        self._farthest = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Rows of unknown future move to the list of the batch that uses them, which has no others yet."""
        self._reach(number)
        if len(slots):
            which = number & (self._size - 1)
            _call(slots, self._place, self._after, self._head, self._tail, which)
            self._called[which] = len(slots)
            self._farthest = max(self._farthest, number)

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Unknown futures from the least recently used, then the farthest batches."""
        self._reach(number)
        out = np.empty(count, np.int32)
        if count:
            taken, self._begin = _oldest(out, self._queue, self._place, self._begin, self._end)
            self._farthest = _farthest(
                out, taken, self._place, self._after, self._head, self._tail, self._called, self._farthest, number
            )
        return out

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Every row of the batch moves on to the list of its next batch."""
        farthest = int(_last_known(next_uses))
        self._reach(farthest)
        self._farthest = max(self._farthest, farthest)
        # The rows that waited for this batch are exactly those of its list: they all move, so the list is dropped whole.
        which = number & (self._size - 1)
        self._head[which] = self._tail[which] = -1
        self._called[which] = 0
        self._now = number + 1
        if self._end + len(slots) > len(self._queue):
            self._begin, self._end = 0, _close_up(self._queue, self._place, self._begin, self._end)
        self._end = _use(
            slots, next_uses, self._queue, self._place, self._end, self._after, self._head, self._tail, self._size
        )

    def _reach(self, number: int) -> None:
        """Have a list for every batch from now to `number`."""
        if number - self._now < self._size:
            return
        size = self._size
        while number - self._now >= size:
            size *= 2
        batches = np.arange(self._now, self._now + self._size)
        old, new = batches & (self._size - 1), batches & (size - 1)
        for name, empty in (("_head", -1), ("_tail", -1), ("_called", 0)):
            grown = np.full(size, empty, np.int32)
            grown[new] = getattr(self, name)[old]
            setattr(self, name, grown)
        self._size = size


@kernel
def _last_known(next_uses):
    last = np.int32(-1)
    for use in next_uses:
        last = max(last, use if use != NEVER else np.int32(-1))
    return last


@kernel
def _append(after, head, tail, which, slot):
    after[slot] = -1
    if tail[which] < 0:
        head[which] = slot
    else:
        after[tail[which]] = slot
    tail[which] = slot


@kernel
def _call(slots, place, after, head, tail, which):
    for slot in slots:
        place[slot] = -2 - place[slot]  # a gap that still tells the order
        _append(after, head, tail, which, slot)


@kernel
def _use(slots, next_uses, queue, place, end, after, head, tail, size):
    for i in range(len(slots)):
        slot = slots[i]
        if next_uses[i] == NEVER:
            queue[end] = slot
            place[slot] = end
            end += 1
        else:  # `_append`, written out: as a call it took six times as long
            which = next_uses[i] & (size - 1)
            before = tail[which]
            after[slot] = -1
            tail[which] = slot
            if before < 0:
                head[which] = slot
            else:
                after[before] = slot
    return end


@kernel
def _oldest(out, queue, place, begin, end):
    """Fill `out` from the queue; how many there were, and where the queue begins now."""
    taken = 0
    while begin < end and taken < len(out):
        slot = queue[begin]
        if place[slot] == begin:
            place[slot] = -1
            out[taken] = slot
            taken += 1
        begin += 1
    return taken, begin


@kernel
def _close_up(queue, place, begin, end):
    """Move the queue to the front, without its gaps; where it ends now."""
    n = 0
    for i in range(begin, end):
        slot = queue[i]
        if place[slot] == i:
            queue[n] = slot
            place[slot] = n
            n += 1
    return n


@kernel
def _farthest(out, taken, place, after, head, tail, called, farthest, number):
    """Fill the rest of `out`; return the farthest batch that may still have rows waiting."""
    size = len(head)
    while taken < len(out):
        if farthest <= number:
            raise RuntimeError("more victims asked for than rows are resident outside the batch")
        which = farthest & (size - 1)
        if head[which] < 0:
            farthest -= 1
            continue
        if called[which] > 1:
            _sort(which, called[which], place, after, head, tail)
        slot = head[which]
        out[taken] = slot
        taken += 1
        head[which] = after[slot]
        if head[which] < 0:
            tail[which] = -1
        called[which] = 0
    return farthest


@kernel
def _sort(which, count, place, after, head, tail):
    """Order the first slots of a list as they were in the queue."""
    members = np.empty(count, np.int32)
    slot = head[which]
    for i in range(count):
        members[i] = slot
        slot = after[slot]
    rest = slot
    members = members[np.argsort(-place[members])]
    head[which] = members[0]
    for i in range(count - 1):
        after[members[i]] = members[i + 1]
    after[members[count - 1]] = rest
    if rest < 0:
        tail[which] = members[count - 1]
