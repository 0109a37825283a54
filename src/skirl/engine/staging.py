"""Reusable buffers for rows on their way. They are reference-counted, and their last owner returns them."""

import threading

import numpy as np

_SMALLEST = 1024


class Staging:
    """Buffers of records of one width.

    >>> staging = Staging(4, np.dtype(np.float32), most=1000)
    >>> rows = staging.take(300)
    >>> rows.shape
    (300, 4)
    >>> staging.release(rows)
    >>> staging.take(250).base is rows.base
    True
    """

    def __init__(self, width: int, dtype: np.dtype, most: int = 0) -> None:
        self.most = most
        """Records in all buffers together, beyond which free buffers are dropped."""
        self._width = width
        self._dtype = dtype
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []
        self._used: dict[int, tuple[np.ndarray, int]] = {}
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        return self._size * self._dtype.itemsize

    @property
    def in_use(self) -> int:
        """Number of buffers that have an owner."""
        return len(self._used)

    def take(self, count: int) -> np.ndarray:
        """Return an array of `count` records with undefined contents."""
        need = count * self._width
        most = max(2 * need, _SMALLEST)
        with self._lock:
            fits = [i for i, buffer in enumerate(self._free) if need <= len(buffer) <= most]
            if fits:
                buffer = self._free.pop(min(fits, key=lambda i: len(self._free[i])))
            else:
                buffer = np.empty(rounded(need, _SMALLEST), self._dtype)
                self._size += len(buffer)
                self._shrink()
            self._used[id(buffer)] = buffer, 1
        return buffer[:need].reshape(count, self._width)

    def retain(self, rows: np.ndarray) -> None:
        """Add an owner."""
        with self._lock:
            buffer, owners = self._used[id(rows.base)]
            self._used[id(buffer)] = buffer, owners + 1

    def release(self, rows: np.ndarray) -> None:
        """Remove an owner. The last one returns the buffer to the free list."""
        with self._lock:
            buffer, owners = self._used[id(rows.base)]
            if owners > 1:
                self._used[id(buffer)] = buffer, owners - 1
                return
            del self._used[id(buffer)]
            self._free.append(buffer)
            self._shrink()

    def reset(self) -> None:
        """Forget all owners. Their buffers are not reused: an owner that is stuck may still write to its own."""
        with self._lock:
            self._size -= sum(len(buffer) for buffer, _ in self._used.values())
            self._used.clear()

    def _shrink(self) -> None:
        while self._free and self._size > max(self.most * self._width, _SMALLEST):
            self._size -= len(self._free.pop(0))  # the one unused for longest, since sizes drift


def rounded(need: int, smallest: int) -> int:
    """Round up to the next 4, 5, 6 or 7 times a power of two, and at least to `smallest`.

    >>> rounded(5000, 1024), rounded(5200, 1024)
    (5120, 6144)
    """
    if need <= smallest:
        return smallest
    step = 1 << (need - 1).bit_length() - 3
    return -(-need // step) * step
