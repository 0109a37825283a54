"""Tensors whose memory is reused as soon as nobody holds them."""

import weakref

import numpy as np
import torch
from numpy.typing import DTypeLike

ALIGNED = 64
"""Bytes of a cache line."""
KEPT = 2
"""Most free buffers that are kept: one for the output, and one for its gradient or for the loss that a loop keeps."""


def empty(size: int, dtype: DTypeLike) -> np.ndarray:
    """Return an array of `size` numbers that begins on a cache line. Its contents are undefined.

    >>> empty(3, np.float32).ctypes.data % 64
    0
    """
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNED // itemsize, dtype)
    skip = -raw.ctypes.data % ALIGNED // itemsize
    return raw[skip : skip + size]


class Reused:
    """Gives out tensors of [rows, dim] with undefined contents.

    A buffer is free when the last tensor that uses it is gone, including views and graphs.

    >>> reused = Reused(np.float32)
    >>> first = reused.take(3, 4)
    >>> place, view = first.data_ptr(), first[0]
    >>> del first
    >>> reused.take(3, 4).data_ptr() == place  # `view` still looks into it
    False
    >>> del view
    >>> reused.take(2, 4).data_ptr() == place
    True
    """

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
