"""Arrays for a process that is forked off this one, in memory that both see: nothing is copied on the way."""

import mmap
from collections.abc import Sequence

import numpy as np

ALIGNED = 64
"""Bytes of a cache line."""

Layout = tuple[tuple[str, tuple[int, ...], int] | None, ...]
"""Of each array its dtype, shape and the byte at which it begins; None for none."""


class SharedSlots:
    """Places for some arrays each; made before the fork. Who puts knows which places are free.

    **Arguments**

    - `count`: how many places.
    - `size`: bytes of each. They take memory when they are first used.

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
        """Copy arrays to a place; where they are there, or None if it is too small for them.

        **Arguments**

        - `slot`: which place; what was in it is gone.
        - `arrays`: of any shapes; None stands for none.
        """
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
        """The arrays themselves, until others are put in their place."""
        return [None if one is None else np.ndarray(one[1], one[0], self._memory, one[2]) for one in layout]
