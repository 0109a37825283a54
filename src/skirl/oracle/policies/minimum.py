"""Belady's MIN by batches, within the window: the row whose next batch is farthest leaves; before it those of unknown
future, in order of least recent use."""

import numpy as np

from skirl.oracle.loops import NEVER
from skirl.tools.jit import kernel


class Minimum:
    """Evicts the rows with the farthest next batch first; ties and unknown futures by least recent use."""

    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        # Rows of unknown future: slots in order, and the place of each slot in this queue. Where they differ is a gap, which
        # a row leaves that the window wants again.
        self._queue = np.empty(2 * capacity + 1, np.int32)
        self._place = np.full(capacity, -1, np.int32)
        self._begin = self._end = 0
        # Rows of known future: a list for each batch from now on, in a ring that grows to the farthest batch known.
        self._size = 16
        self._lists = np.full((self._size, 2), -1, np.int32)
        """For each: its first slot, and its last one."""
        self._after = np.empty(capacity, np.int32)
        """The slot that follows each one in its list; -1: none."""
        self._called = np.zeros(self._size, np.int32)
        """For each list: how many slots at its head came from the queue, in the order of the batch that called them."""
        self._now = 0
        self._farthest = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Move rows of unknown future to the list of the batch that uses them, which is empty until then."""
        self._reach(number)
        if len(slots):
            which = number & (self._size - 1)
            _call(slots, self._place, self._lists, self._after, which)
            self._called[which] = len(slots)
            self._farthest = max(self._farthest, number)

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return slots of rows with unknown future, the least recently used first, then of the farthest batches."""
        self._reach(number)
        out = np.empty(count, np.int32)
        if count:
            taken, self._begin = _oldest(out, self._queue, self._place, self._begin, self._end)
            while taken < count:
                own = out, taken, self._lists, self._after, self._called, self._farthest, number
                taken, self._farthest = _farthest(*own)
                if taken < count:
                    self._sort(self._farthest & (self._size - 1))
        return out

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Move every row of the batch on to the list of its next batch."""
        farthest = int((next_uses + np.int32(1)).max(initial=0)) - 1  # NEVER + 1 wraps around
        self._reach(farthest)
        self._farthest = max(self._farthest, farthest)
        # The rows that waited for this batch are exactly those of its list: they all move, so the list is dropped whole.
        self._lists[number & (self._size - 1)] = -1
        self._called[number & (self._size - 1)] = 0
        self._now = number + 1
        if self._end + len(slots) > len(self._queue):
            self._begin, self._end = 0, _close_up(self._queue, self._place, self._begin, self._end)
        self._end = _use(slots, next_uses, self._queue, self._place, self._end, self._lists, self._after)

    def _sort(self, which: int) -> None:
        """Put the slots at the head of a list in the order that they had in the queue."""
        members = np.empty(self._called[which], np.int32)
        rest = _head(members, which, self._lists, self._after)
        members = members[np.argsort(-self._place[members])]
        self._lists[which, 0], self._called[which] = members[0], 0
        self._after[members] = np.append(members[1:], rest)
        if rest < 0:
            self._lists[which, 1] = members[-1]

    def _reach(self, number: int) -> None:
        """Make sure that there is a list for every batch from now to `number`."""
        if number - self._now < self._size:
            return
        size = self._size
        while number - self._now >= size:
            size *= 2
        batches = np.arange(self._now, self._now + self._size)
        old, new = batches & (self._size - 1), batches & (size - 1)
        lists, called = np.full((size, 2), -1, np.int32), np.zeros(size, np.int32)
        lists[new], called[new] = self._lists[old], self._called[old]
        self._lists, self._called, self._size = lists, called, size


@kernel
def _append(slot, lists, after, which):
    if lists[which, 0] < 0:
        lists[which, 0] = slot
    else:
        after[lists[which, 1]] = slot
    lists[which, 1] = slot
    after[slot] = -1


@kernel
def _call(slots, place, lists, after, which):
    for slot in slots:
        place[slot] = -2 - place[slot]  # a gap that still gives the order
        _append(slot, lists, after, which)


@kernel
def _use(slots, next_uses, queue, place, end, lists, after):
    size = len(lists)
    for i in range(len(slots)):
        slot = slots[i]
        if next_uses[i] == NEVER:
            queue[end] = slot
            place[slot] = end
            end += 1
        else:
            _append(slot, lists, after, next_uses[i] & (size - 1))
    return end


@kernel
def _oldest(out, queue, place, begin, end):
    """Fill `out` from the queue. Return how many there were, and where the queue begins now."""
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
    """Move the queue to the front, without its gaps. Return its new end."""
    n = 0
    for i in range(begin, end):
        slot = queue[i]
        if place[slot] == i:
            queue[n] = slot
            place[slot] = n
            n += 1
    return n


@kernel
def _farthest(out, taken, lists, after, called, farthest, number):
    """Fill `out` on, up to a list to be sorted. Return how many there are, and the farthest batch that may have
    rows."""
    size = len(lists)
    while taken < len(out):
        if farthest <= number:
            raise RuntimeError("more victims asked for than rows are resident outside the batch")
        which = farthest & (size - 1)
        slot = lists[which, 0]
        if slot >= 0 and called[which] > 1:
            break
        while slot >= 0 and taken < len(out):
            out[taken] = slot
            taken += 1
            slot = after[slot]
        lists[which, 0], called[which] = slot, 0
        if slot < 0:
            farthest -= 1
    return taken, farthest


@kernel
def _head(members, which, lists, after):
    """Fill `members` with the first slots of a list, and return the slot after these."""
    slot = lists[which, 0]
    for i in range(len(members)):
        members[i] = slot
        slot = after[slot]
    return slot
