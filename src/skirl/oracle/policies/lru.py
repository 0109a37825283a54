"""Least recently used, by batches: for comparison with MIN.

Rows of one batch are ordered by their last position in it, as in the usual definition of LRU on a stream of ids.
"""

import numpy as np

from skirl.tools.jit import kernel


class LRU:
    """Evicts the row whose last use is oldest. Slots are in a doubly linked list, the oldest first."""

    wants_last = False

    def __init__(self, capacity: int, depth: int) -> None:
        self._after = np.full(capacity, -1, np.int32)
        self._before = np.full(capacity, -1, np.int32)
        self._ends = np.full(2, -1, np.int32)
        """The oldest and the most recent slot; -1: the list is empty."""

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Do nothing: the future does not matter."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return slots from the oldest on. First make the batch's own rows the most recent, so that none of them leaves."""
        out = np.empty(count, np.int32)
        _touch(batch, self._after, self._before, self._ends)
        _evict(out, self._after, self._before, self._ends)
        return out

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Make the batch's rows the most recent."""
        _touch(slots, self._after, self._before, self._ends)


@kernel
def _append(after, before, ends, slot):
    last = ends[1]
    before[slot] = last
    after[slot] = -1
    if last < 0:
        ends[0] = slot
    else:
        after[last] = slot
    ends[1] = slot


@kernel
def _unlink(after, before, ends, slot):
    left, right = before[slot], after[slot]
    if left < 0:
        ends[0] = right
    else:
        after[left] = right
    if right < 0:
        ends[1] = left
    else:
        before[right] = left


@kernel
def _touch(slots, after, before, ends):
    """Move slots to the recent end, in this order. Skip negative ones."""
    for slot in slots:
        if slot >= 0:
            if ends[0] == slot or before[slot] >= 0:
                _unlink(after, before, ends, slot)
            _append(after, before, ends, slot)


@kernel
def _evict(out, after, before, ends):
    for i in range(len(out)):
        slot = ends[0]
        _unlink(after, before, ends, slot)
        before[slot] = after[slot] = -1
        out[i] = slot
