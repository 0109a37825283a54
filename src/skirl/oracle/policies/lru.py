"""Least recently used, by batches: for comparison with MIN, which fetches 1.3 to 2 times less on traces.

Rows of one batch are ordered by their last position in it, as the usual definition of LRU on a stream of ids has it.
"""

import numpy as np

from skirl.tools.jit import kernel


class Links:
    """Forward and backward links of every slot, and the ends of every list: a row leaves its middle in constant time."""

    def __init__(self, slots: int, lists: int) -> None:
        self.after = np.full(slots, -1, np.int32)
        self.before = np.full(slots, -1, np.int32)
        self.head = np.full(lists, -1, np.int32)
        self.tail = np.full(lists, -1, np.int32)


class LRU:
    """The row whose last use is oldest leaves."""

    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        self._links = Links(capacity, 1)

    def entered(self, slots: np.ndarray, number: int) -> None:
        """The future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """From the oldest, passing over the batch's own rows."""
        out = np.empty(count, np.int32)
        links = self._links
        _pin(batch, links.after, links.before, links.head, links.tail)
        _evict(out, links.after, links.before, links.head, links.tail)
        return out

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """The batch's rows are the most recent now."""
        links = self._links
        _touch(slots, links.after, links.before, links.head, links.tail)


@kernel
def append(after, before, head, tail, which, slot):
    """Put a slot at the end of a list."""
    last = tail[which]
    before[slot] = last
    after[slot] = -1
    if last < 0:
        head[which] = slot
    else:
        after[last] = slot
    tail[which] = slot


@kernel
def unlink(after, before, head, tail, which, slot):
    """Take a slot out of the list it is in."""
    left, right = before[slot], after[slot]
    if left < 0:
        head[which] = right
    else:
        after[left] = right
    if right < 0:
        tail[which] = left
    else:
        before[right] = left


@kernel
def _linked(after, before, head, slot):
    return head[0] == slot or before[slot] >= 0


@kernel
def _pin(batch, after, before, head, tail):
    for slot in batch:
        if slot >= 0:
            unlink(after, before, head, tail, 0, slot)
            append(after, before, head, tail, 0, slot)


@kernel
def _touch(slots, after, before, head, tail):
    for slot in slots:
        if _linked(after, before, head, slot):
            unlink(after, before, head, tail, 0, slot)
        append(after, before, head, tail, 0, slot)


@kernel
def _evict(out, after, before, head, tail):
    for i in range(len(out)):
        slot = head[0]
        unlink(after, before, head, tail, 0, slot)
        before[slot] = after[slot] = -1
        out[i] = slot
