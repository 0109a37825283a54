"""Belady's MIN by batches, within the window: the row whose next batch is farthest leaves.

Rows of unknown future leave first, in order of least recent use."""

import numpy as np

from skirl.oracle.loops import NEVER
from skirl.tools.jit import kernel

PIECE = 16
"""int32s in a piece: the next piece of the list, and 15 slots."""


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
        self._lists = np.full((self._size, 4), -1, np.int32)
        """For each: its first piece, the place of its first slot there, its last piece, the place after its last slot."""
        self._pieces = np.empty((0, PIECE), np.int32)
        self._free = np.array([-1, 0], np.int64)
        """The first free piece, and the number of free pieces."""
        self._held = np.zeros(self._size, np.int64)
        self._called = np.zeros(self._size, np.int32)
        """For each list: how many slots at its head came from the queue, in the order of the batch that called them."""
        self._now = 0
        self._farthest = 0

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Move rows of unknown future to the list of the batch that uses them, which is empty until then."""
        self._reach(number)
        if len(slots):
            which = number & (self._size - 1)
            self._reserve(len(slots))
            _call(slots, self._place, self._lists, self._pieces, self._free, self._held, which)
            self._called[which] = len(slots)
            self._farthest = max(self._farthest, number)

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return slots of rows with unknown future, the least recently used first, then of the farthest batches."""
        self._reach(number)
        out = np.empty(count, np.int32)
        if count:
            taken, self._begin = _oldest(out, self._queue, self._place, self._begin, self._end)
            self._farthest = _farthest(
                out, taken, self._place, self._lists, self._pieces, self._free, self._held, self._called, self._farthest,
                number,
            )  # fmt: skip
        return out

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Move every row of the batch on to the list of its next batch."""
        farthest = int(np.where(next_uses == NEVER, -1, next_uses).max(initial=-1))
        self._reach(farthest)
        self._farthest = max(self._farthest, farthest)
        # The rows that waited for this batch are exactly those of its list: they all move, so the list is dropped whole.
        _drop(self._lists, self._pieces, self._free, self._held, number & (self._size - 1))
        self._called[number & (self._size - 1)] = 0
        self._now = number + 1
        if self._end + len(slots) > len(self._queue):
            self._begin, self._end = 0, _close_up(self._queue, self._place, self._begin, self._end)
        self._reserve(len(slots))
        self._end = _use(
            slots, next_uses, self._queue, self._place, self._end, self._lists, self._pieces, self._free, self._held
        )

    def _reserve(self, slots: int) -> None:
        need = slots // (PIECE - 1) + min(slots, self._size) + 1
        if need <= self._free[1]:
            return
        before = len(self._pieces)
        more = max(need, before)
        pieces = np.empty((before + more, PIECE), np.int32)
        pieces[:before] = self._pieces
        pieces[before:, 0] = np.arange(before + 1, before + more + 1)
        pieces[-1, 0] = self._free[0]
        self._pieces = pieces
        self._free[:] = before, self._free[1] + more

    def _reach(self, number: int) -> None:
        """Make sure that there is a list for every batch from now to `number`."""
        if number - self._now < self._size:
            return
        size = self._size
        while number - self._now >= size:
            size *= 2
        batches = np.arange(self._now, self._now + self._size)
        old, new = batches & (self._size - 1), batches & (size - 1)
        lists, held, called = np.full((size, 4), -1, np.int32), np.zeros(size, np.int64), np.zeros(size, np.int32)
        lists[new], held[new], called[new] = self._lists[old], self._held[old], self._called[old]
        self._lists, self._held, self._called, self._size = lists, held, called, size


@kernel
def _extend(lists, pieces, free, held, which):
    piece = free[0]
    free[0] = pieces[piece, 0]
    free[1] -= 1
    held[which] += 1
    pieces[piece, 0] = -1
    if lists[which, 2] < 0:
        lists[which, 0] = piece
        lists[which, 1] = 1
    else:
        pieces[lists[which, 2], 0] = piece
    lists[which, 2] = piece
    lists[which, 3] = 1


@kernel
def _drop(lists, pieces, free, held, which):
    if lists[which, 0] >= 0:
        pieces[lists[which, 2], 0] = free[0]
        free[0] = lists[which, 0]
        free[1] += held[which]
    held[which] = 0
    lists[which, 0] = lists[which, 2] = -1
    lists[which, 3] = PIECE


@kernel
def _call(slots, place, lists, pieces, free, held, which):
    for slot in slots:
        place[slot] = -2 - place[slot]  # a gap that still gives the order
        if lists[which, 2] < 0 or lists[which, 3] == PIECE:
            _extend(lists, pieces, free, held, which)
        pieces[lists[which, 2], lists[which, 3]] = slot
        lists[which, 3] += 1


@kernel
def _use(slots, next_uses, queue, place, end, lists, pieces, free, held):
    size = len(lists)
    for i in range(len(slots)):
        slot = slots[i]
        if next_uses[i] == NEVER:
            queue[end] = slot
            place[slot] = end
            end += 1
        else:
            which = next_uses[i] & (size - 1)
            if lists[which, 2] < 0 or lists[which, 3] == PIECE:
                _extend(lists, pieces, free, held, which)
            pieces[lists[which, 2], lists[which, 3]] = slot
            lists[which, 3] += 1
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
def _farthest(out, taken, place, lists, pieces, free, held, called, farthest, number):
    """Fill the rest of `out`. Return the farthest batch that may still have rows waiting."""
    size = len(lists)
    while taken < len(out):
        if farthest <= number:
            raise RuntimeError("more victims asked for than rows are resident outside the batch")
        which = farthest & (size - 1)
        if lists[which, 0] < 0:
            farthest -= 1
            continue
        if called[which] > 1:
            _sort(which, called[which], place, lists, pieces)
        called[which] = 0
        piece = lists[which, 0]
        end = lists[which, 3] if piece == lists[which, 2] else PIECE
        i = lists[which, 1]
        while i < end and taken < len(out):
            out[taken] = pieces[piece, i]
            taken += 1
            i += 1
        lists[which, 1] = i
        if i == end:
            following = pieces[piece, 0]
            pieces[piece, 0] = free[0]
            free[0] = piece
            free[1] += 1
            held[which] -= 1
            lists[which, 0] = following
            lists[which, 1] = 1
            if following < 0:
                lists[which, 2] = -1
    return farthest


@kernel
def _sort(which, count, place, lists, pieces):
    """Put the first slots of a list in the order that they had in the queue."""
    members = np.empty(count, np.int32)
    for turn in range(2):  # read them, write them
        piece, at = lists[which, 0], lists[which, 1]
        for i in range(count):
            if at == PIECE:
                piece, at = pieces[piece, 0], 1
            if turn == 0:
                members[i] = pieces[piece, at]
            else:
                pieces[piece, at] = members[i]
            at += 1
        if turn == 0:
            members = members[np.argsort(-place[members])]
