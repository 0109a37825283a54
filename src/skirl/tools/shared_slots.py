"""Arrays for a process that is forked off this one, in memory that both see, so that nothing is copied on the way."""

import mmap
from collections.abc import Sequence

import numpy as np

ALIGNED = 64
"""Bytes of a cache line."""

Layout = tuple[tuple[str, tuple[int, ...], int] | None, ...]
"""For each array its dtype, its shape and the byte at which it begins; None for no array."""


class SharedSlots:
    """Slots that hold some arrays each, made before the fork. Whoever calls `put` keeps track of which are free.

    >>> slots = SharedSlots(2, 1024)
    >>> layout = slots.put(1, [np.arange(3), None, np.ones((2, 2), np.float32)])
    >>> [None if array is None else array.tolist() for array in slots.get(layout)]
    [[0, 1, 2], None, [[1.0, 1.0], [1.0, 1.0]]]
    >>> slots.put(0, [np.zeros(1025, np.int8)])  # too large
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)

    def put(self, slot: int, arrays: Sequence[np.ndarray | None]) -> Layout | None:
        """Copy arrays to a slot. Return where they are, or None if it is too small for them."""
        at, layout = slot * self._size, []
        for array in arrays:
            layout.append(None if array is None else (array.dtype.str, array.shape, at))
            at += 0 if array is None else -(-array.nbytes // ALIGNED) * ALIGNED
        if at > (slot + 1) * self._size:
            return None
        for here, array in zip(self.get(layout), arrays, strict=True):
            if here is not None:
                here[...] = array
        return tuple(layout)

    def get(self, layout: Sequence[tuple[str, tuple[int, ...], int] | None]) -> list[np.ndarray | None]:
        """Return the arrays themselves, valid until others are put in their place."""
        return [None if one is None else np.ndarray(one[1], one[0], self._memory, one[2]) for one in layout]
