"""Linked lists through slots: each resident row is in one list, and leaves its middle in constant time.

Two int32 links a slot. A heap by next use would cost a logarithm and a comparison chain for every use; a list a batch needs
neither, because all rows of one list share their next use.
"""

import numpy as np

from skirl.jit import kernel


class Links:
    """Forward and backward links of every slot, and the ends of every list."""

    def __init__(self, slots: int, lists: int) -> None:
        self.after = np.full(slots, -1, np.int32)
        self.before = np.full(slots, -1, np.int32)
        self.head = np.full(lists, -1, np.int32)
        self.tail = np.full(lists, -1, np.int32)


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
