"""Tensors whose memory is used again as soon as nobody holds them.

The output of a step is 54 MB at batch 8192 x 26 x 64 and lives until its backward has run. malloc hands memory of that size
back to the system every time, so each step faults all its pages in anew: 20 ms, where filling it takes 4. Here it is kept,
at most `KEPT` buffers. A fixed buffer would be simpler, and a loss kept for two steps would find another step's numbers in
it; so a buffer is free only when the last tensor that looks into it is gone, views and graphs included.
"""

import weakref

import numpy as np
import torch
from numpy.typing import DTypeLike

ALIGNED = 64
"""Bytes: a cache line."""
KEPT = 2
"""Free buffers: one for the output and one for its gradient, or for the two outputs of a loop that keeps its last."""


def empty(size: int, dtype: DTypeLike) -> np.ndarray:
    """An array of `size` numbers from a cache line on; numpy asks the system for huge pages where it is large.

    >>> empty(3, np.float32).ctypes.data % 64
    0
    """
    itemsize = np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNED // itemsize, dtype)
    skip = -raw.ctypes.data % ALIGNED // itemsize
    return raw[skip : skip + size]


class Reused:
    """Gives tensors of [rows, dim] out; their contents are undefined.

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
        """A tensor over a free buffer of at most twice the size, or over a new one."""
        need = rows * dim
        fits = [i for i, buffer in enumerate(self._free) if need <= len(buffer) <= 2 * max(need, 1024)]
        buffer = self._free.pop(fits[-1]) if fits else empty(need, self._dtype)
        array = buffer[:need].reshape(rows, dim)
        # torch holds this very object for as long as any tensor needs its memory.
        weakref.finalize(array, _give_back, self._free, buffer).atexit = False
        return torch.from_numpy(array)


def _give_back(free: list[np.ndarray], buffer: np.ndarray) -> None:
    free.append(buffer)
    if len(free) > KEPT:
        free.pop(0)  # the one unused for longest
