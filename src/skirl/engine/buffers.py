"""Memory that is reused: tensors in host memory, whose buffers come back with their last user."""

import weakref

import numpy as np
import torch
from numpy.typing import DTypeLike


def rounded(need: int, smallest: int) -> int:
    """Round up to the next 4, 5, 6 or 7 times a power of two, and at least to `smallest`."""
    if need <= smallest:
        return smallest
    step = 1 << (need - 1).bit_length() - 3
    return -(-need // step) * step


ALIGNED = 64
KEPT = 2
"""Most free buffers that are kept: one for the output, and one for its gradient or for the loss that a loop keeps; or one
for rows that come to the cache, and one for those that leave it."""
SMALLEST = 1024


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
        buffer = empty(rounded(need, SMALLEST), self._dtype) if buffer is None else buffer
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
                if need <= len(buffer) <= 2 * max(need, SMALLEST):
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
