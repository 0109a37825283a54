"""Buffers for rows on their way, and for plans: reused, counted by owners, and given back by the last one."""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

SMALLEST = 1 << 12
"""Bytes of the smallest buffer."""
ALWAYS = 1 << 16
"""Bytes of all buffers beyond which free ones may be dropped, however small the cache is: its steps need these."""


@dataclass(eq=False)
class Buffer:
    """Memory that a pool gave out."""

    size: int
    """In bytes."""
    owners: int = field(default=1, init=False)


B = TypeVar("B", bound=Buffer)


class Pool(ABC, Generic[B]):
    """Gives out buffers, to any thread."""

    def __init__(self, most: int = 0, kept: int = 1 << 30) -> None:
        self.most, self.kept = most, kept
        """Bytes in all buffers together, and number of free ones, beyond which free buffers are dropped."""
        self._lock = threading.Lock()
        self._free: list[B] = []
        self._used: set[B] = set()
        self._size = 0

    @abstractmethod
    def make(self, size: int) -> B:
        """Allocate a buffer of so many bytes."""

    @abstractmethod
    def drop(self, buffer: B) -> None:
        """Prepare for the buffer's memory to be freed."""

    def choose(self, fits: list[B]) -> B:
        """Return the free buffer that has been unused for longest."""
        return fits[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        return self._size

    @property
    def in_use(self) -> int:
        """Number of buffers that have an owner."""
        return len(self._used)

    def take(self, nbytes: int) -> B:
        """Return a buffer of at least this many bytes, with undefined contents."""
        with self._lock:
            fits = [buffer for buffer in self._free if nbytes <= buffer.size <= max(2 * nbytes, SMALLEST)]
            if fits:
                buffer = self.choose(fits)
                self._free.remove(buffer)
                buffer.owners = 1
            else:
                size = rounded(nbytes, SMALLEST)
                self._size += size
                self._shrink()
                buffer = self.make(size)
            self._used.add(buffer)
            return buffer

    def retain(self, buffer: B) -> None:
        """Add an owner."""
        with self._lock:
            buffer.owners += 1

    def release(self, buffer: B) -> None:
        """Remove an owner. The last one gives the buffer back."""
        with self._lock:
            if buffer not in self._used:  # forgotten by `reset`
                return
            buffer.owners -= 1
            if not buffer.owners:
                self._used.remove(buffer)
                self._free.append(buffer)
                self._shrink()

    def reset(self) -> None:
        """Forget all owners and their buffers: a stuck thread may still write to one. Nothing may be on its way."""
        with self._lock:
            self._size -= sum(buffer.size for buffer in self._used)
            self._used.clear()

    def _shrink(self) -> None:
        while self._free and (self._size > max(self.most, ALWAYS) or len(self._free) > self.kept):
            buffer = self._free.pop(0)
            self._size -= buffer.size
            self.drop(buffer)


@dataclass(eq=False)
class HostBuffer(Buffer):
    """A buffer in host memory."""

    array: np.ndarray
    rows: np.ndarray = field(init=False)
    """The records that it holds now."""


class Staging(Pool[HostBuffer]):
    """Records of one width in host memory.

    >>> staging = Staging(4, np.dtype(np.float32), most=1 << 20)
    >>> buffer = staging.of(300)
    >>> buffer.rows.shape
    (300, 4)
    >>> staging.release(buffer)
    >>> staging.of(250) is buffer
    True
    """

    def __init__(self, width: int, dtype: np.dtype, most: int = 0) -> None:
        super().__init__(most)
        self._width, self._dtype = width, dtype

    def of(self, count: int) -> HostBuffer:
        """Return a buffer with room for so many records."""
        nbytes = count * self._width * self._dtype.itemsize
        buffer = self.take(nbytes)
        buffer.rows = buffer.array[:nbytes].view(self._dtype).reshape(count, self._width)
        return buffer

    def make(self, size: int) -> HostBuffer:
        return HostBuffer(size, np.empty(size, np.uint8))

    def drop(self, buffer: HostBuffer) -> None:
        pass


def rounded(need: int, smallest: int) -> int:
    """Round up to the next 4, 5, 6 or 7 times a power of two, and at least to `smallest`.

    >>> rounded(5000, 1024), rounded(5200, 1024)
    (5120, 6144)
    """
    if need <= smallest:
        return smallest
    step = 1 << (need - 1).bit_length() - 3
    return -(-need // step) * step
