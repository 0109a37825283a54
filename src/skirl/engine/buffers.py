"""Memory that is reused: buffers counted by owners, for rows on their way, and tensors freed with their last user."""

import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike

SMALLEST = 1 << 12
ALWAYS = 1 << 16
"""Bytes of all buffers beyond which free ones may be dropped, however small the cache is: its steps need these."""


@dataclass(eq=False)
class Buffer:
    """Memory that a pool gave out."""

    size: int
    owners: int = field(default=1, init=False)


B = TypeVar("B", bound=Buffer)


class Pool(ABC, Generic[B]):
    def __init__(self, most: int = 0, kept: int = 1 << 30) -> None:
        self.most, self.kept = most, kept
        """Bytes in all buffers together, and number of free ones, beyond which free buffers are dropped."""
        self._lock = threading.Lock()
        self._free: list[B] = []
        self._used: set[B] = set()
        self._size = 0

    @abstractmethod
    def make(self, size: int) -> B: ...

    def drop(self, buffer: B) -> None:
        """Prepare for the buffer's memory to be freed."""

    @property
    def nbytes(self) -> int:
        return self._size

    @property
    def in_use(self) -> int:
        return len(self._used)

    def take(self, nbytes: int) -> B:
        """Return a buffer of at least this many bytes, with undefined contents."""
        with self._lock:
            # the one that has been unused for longest
            buffer = next((one for one in self._free if nbytes <= one.size <= max(2 * nbytes, SMALLEST)), None)
            if buffer is not None:
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
    array: np.ndarray
    rows: np.ndarray = field(init=False)
    """The records that it holds now."""


class Staging(Pool[HostBuffer]):
    def __init__(self, width: int, dtype: np.dtype, most: int = 0) -> None:
        super().__init__(most)
        self._width, self._dtype = width, dtype

    def of(self, count: int) -> HostBuffer:
        nbytes = count * self._width * self._dtype.itemsize
        buffer = self.take(nbytes)
        buffer.rows = buffer.array[:nbytes].view(self._dtype).reshape(count, self._width)
        return buffer

    def make(self, size: int) -> HostBuffer:
        return HostBuffer(size, np.empty(size, np.uint8))


def rounded(need: int, smallest: int) -> int:
    """Round up to the next 4, 5, 6 or 7 times a power of two, and at least to `smallest`."""
    if need <= smallest:
        return smallest
    step = 1 << (need - 1).bit_length() - 3
    return -(-need // step) * step


ALIGNED = 64
KEPT = 2
"""Most free buffers that are kept: one for the output, and one for its gradient or for the loss that a loop keeps."""


def empty(size: int, dtype: DTypeLike) -> np.ndarray:
    """Return an array of `size` numbers that begins on a cache line. Its contents are undefined."""
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNED // itemsize, dtype)
    skip = -raw.ctypes.data % ALIGNED // itemsize
    return raw[skip : skip + size]


class Reused:
    """Gives out tensors with undefined contents. A buffer is free when the last tensor that uses it is gone, including
    views and graphs."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._free: list[np.ndarray] = []

    def take(self, rows: int, dim: int) -> torch.Tensor:
        """Return a tensor in a free buffer of at most twice the size, or in a new one."""
        need = rows * dim
        buffer = self._fitting(need)
        buffer = empty(need, self._dtype) if buffer is None else buffer
        array = buffer[:need].reshape(rows, dim)
        # torch keeps this object for as long as any tensor needs its memory.
        weakref.finalize(array, _give_back, self._free, buffer).atexit = False
        return torch.from_numpy(array)

    def _fitting(self, need: int) -> np.ndarray | None:
        """Return the free buffer that fits and was used last, or None. Any thread may give one back meanwhile, so this
        uses only a list's own methods, which are atomic.
        """
        passed: list[np.ndarray] = []
        try:
            while self._free:
                buffer = self._free.pop()
                if need <= len(buffer) <= 2 * max(need, 1024):
                    return buffer
                passed.append(buffer)
        except IndexError:  # another thread took the last one
            pass
        finally:
            self._free.extend(reversed(passed))
        return None


def _give_back(free: list[np.ndarray], buffer: np.ndarray) -> None:
    free.append(buffer)
    if len(free) > KEPT:
        del free[:1]  # the one unused for longest
