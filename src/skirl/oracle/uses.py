"""The uses of the window: one for each distinct row of each batch. Each use of a row is linked to the next."""

import bisect
from typing import NamedTuple

import numpy as np

MOST = 1 << 30
"""Most places: an int32 has to hold them and other states as well."""
AT_ONCE = 1 << 26
"""Most places whose memory is allocated at the first batch. Pages are backed when first written."""


class UseArrays(NamedTuple):
    handle: np.ndarray
    next: np.ndarray
    slot: np.ndarray
    batch: np.ndarray
    bits: int


class Uses:
    """The uses of all batches of the window. Those of one batch are adjacent, in blocks whose size is a power of two.
    The slot of a use that is not planned: 0 or more, the row is there; -1, not known: an earlier use comes first, or
    the row is nowhere; < -EVICTED, it was evicted: the number of the eviction, as in the row's state."""

    def __init__(self, depth: int) -> None:
        self.bits = 0
        """Size of a block, as a power of two. The first batch that has any uses fixes it."""
        self.handle = self.next = self.slot = np.empty(0, np.int32)
        self.batch = np.empty(0, np.int32)
        self._depth = depth
        self._free: list[tuple[int, int]] = []
        """Stretches of free blocks, in order: (first, end)."""

    @property
    def arrays(self) -> UseArrays:
        """The arrays, as long as no more batches come."""
        return UseArrays(self.handle, self.next, self.slot, self.batch, self.bits)

    def take(self, count: int, number: int) -> int:
        if not count:
            return 0
        if not self.bits:
            self.bits = max(4, (count // 64).bit_length())
            self._grow(self._blocks(count) * (self._depth + 1))
        blocks = self._blocks(count)
        if not any(end - first >= blocks for first, end in self._free):
            self._grow(max(blocks, len(self.batch)))
        i = next(i for i, (first, end) in enumerate(self._free) if end - first >= blocks)
        first, end = self._free[i]
        self._free[i : i + 1] = [(first + blocks, end)] if first + blocks < end else []
        self.batch[first : first + blocks] = number
        return first << self.bits

    def give(self, place: int, count: int) -> None:
        """Free the uses that begin there: their batch is planned."""
        if not count:
            return
        first = place >> self.bits
        self._add(first, first + self._blocks(count))

    def _blocks(self, count: int) -> int:
        return -(-count >> self.bits)

    def _add(self, first: int, end: int) -> None:
        i = bisect.bisect(self._free, (first, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == first:
            i -= 1
            first = self._free.pop(i)[0]
        self._free.insert(i, (first, end))

    def _grow(self, more: int) -> None:
        """Add blocks. Places stay what they are."""
        blocks = len(self.batch)
        more = min(more, max(self._blocks(AT_ONCE), blocks, 1))
        if (blocks + more) << self.bits > MOST:
            raise MemoryError(
                f"a window of more than {MOST:,} distinct rows is too large to plan: set depth to a smaller number of "
                "batches, or to 'epoch'"
            )
        for name in ("handle", "next", "slot"):
            grown = np.empty((blocks + more) << self.bits, np.int32)
            grown[: blocks << self.bits] = getattr(self, name)
            setattr(self, name, grown)
        self.batch = np.concatenate([self.batch, np.full(more, -1, np.int32)])
        self._add(blocks, blocks + more)
