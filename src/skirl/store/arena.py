"""Arrays that grow in place."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALLEST = 64 << 10


class Arena:
    """A growing array: `array` has room for `len(arena)` items, and new room is all zero bytes.

    `reserve` may move the array: read `array` again after each call, and keep no view of it during one.

    >>> arena = Arena("float32", (3,))
    >>> arena.reserve(2)
    >>> arena.array[1] = 1
    >>> arena.reserve(100_000)
    >>> arena.array[1]
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self._item = self._dtype.itemsize * int(np.prod(shape))
        self._map = _anonymous(_SMALLEST)

    def __len__(self) -> int:
        return len(self._map) // self._item

    @property
    def array(self) -> NDArray[Any]:
        """A view of all the room, made anew each time (1 us), because a map with views on it cannot grow in place."""
        numbers = len(self) * (self._item // self._dtype.itemsize)
        return np.frombuffer(self._map, self._dtype, numbers).reshape(len(self), *self._shape)

    def reserve(self, items: int, *, spare: float = 0.5) -> None:
        """Make room for `items` in all, or grow by a fraction of `spare`, whichever is more.

        Spare room takes no memory until it is written to, but counts towards a limit of the process (RLIMIT_DATA).
        """
        if items > len(self):
            self._map = _grown(self._map, _whole_pages(max(items * self._item, int(len(self._map) * (1 + spare)))))


def _anonymous(size: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        # Python's default is shared memory, which cannot grow on Linux, and which a forked child would write to.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _whole_pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _grown(old: mmap.mmap, size: int) -> mmap.mmap:
    """Return a larger map with the same bytes, grown in place if possible."""
    try:
        old.resize(size)
        return old
    except (SystemError, ValueError, BufferError):  # no mremap here, or a traceback still holds a view
        return _copied(old, size)
    except OSError as error:
        raise MemoryError(f"no room to grow to {size:,} bytes: set a smaller cache, or keep rows on disk") from error


def _copied(old: mmap.mmap, size: int) -> mmap.mmap:
    new = _anonymous(size)
    with memoryview(old) as source, memoryview(new) as target:
        target[: len(source)] = source
    return new
