"""Arrays that grow in place."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skirl.tools.hash_index import mix
from skirl.tools.jit import kernel

_SMALLEST = 64 << 10


class Arena:
    """A growing array: `array` has room for `len(arena)` items, and new room is all zero bytes.

    `reserve` may move the array: read `array` again after each call, and keep no view of it during one.
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
            size, page = max(items * self._item, int(len(self._map) * (1 + spare))), mmap.PAGESIZE
            size = -(-size // page) * page
            try:
                self._map.resize(size)
            except BufferError:  # a traceback still holds a view
                old, self._map = self._map, _anonymous(size)
                self._map[: len(old)] = memoryview(old)
            except OSError as error:
                raise MemoryError(
                    f"no room to grow to {size:,} bytes: set a smaller cache, or keep rows on disk"
                ) from error


def _anonymous(size: int) -> mmap.mmap:
    # Python's default is shared memory, which cannot grow on Linux, and which a forked child would write to.
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


MAX_POSITIONS = (1 << 31) - 1
_MAX_PLACES = (1 << 32) - 1  # `mix` has 32 bits
_HALF = np.uint64(32)


@kernel
def _probe(table: NDArray[np.int32], held: NDArray[np.int64], key: int) -> int:
    """Return the place of a key in the table, or the free place (0) where it belongs. The table holds positions + 1."""
    # A product spreads 32 bits over any size, so the table can grow by half. A mask would need a power of two.
    place = np.int64((np.uint64(mix(key)) * np.uint64(table.size)) >> _HALF)
    while table[place] != 0 and held[table[place] - 1] != key:
        place += 1
        if place == table.size:
            place = 0
    return place  # pyright: ignore[reportReturnType]


@kernel
def _locate(
    table: NDArray[np.int32], held: NDArray[np.int64], keys: NDArray[np.int64], positions: NDArray[np.int32]
) -> None:
    for i in range(keys.size):
        positions[i] = table[_probe(table, held, keys[i])] - 1


@kernel
def _place(
    table: NDArray[np.int32],
    held: NDArray[np.int64],
    count: NDArray[np.int64],
    keys: NDArray[np.int64],
    positions: NDArray[np.int32],
) -> None:
    for i in range(keys.size):
        place = _probe(table, held, keys[i])
        if table[place] == 0:
            held[count[0]] = keys[i]
            count[0] += 1
            table[place] = count[0]
        positions[i] = table[place] - 1


@kernel
def _refill(table: NDArray[np.int32], held: NDArray[np.int64], count: int) -> None:
    for position in range(count):
        table[_probe(table, held, held[position])] = position + 1


class Directory:
    """The position of each key. Positions count from 0 and never change."""

    def __init__(self) -> None:
        self._count = np.zeros(1, np.int64)  # an array, so that the kernel sets it, and no Ctrl-C can come in between
        self._held = Arena(np.int64)
        self._table = np.zeros(64, np.int32)
        self._filled = True

    @property
    def count(self) -> int:
        return int(self._count[0])

    @property
    def keys(self) -> NDArray[np.int64]:
        """The key of each position, as a view that must be dropped before the next `reserve`."""
        return self._held.array[: self.count]

    def has_room(self, n_more: int) -> bool:
        return self.count + n_more <= min(len(self._held), self._table.size * 3 // 5)

    def reserve(self, n_more: int) -> None:
        if self.has_room(n_more):
            return
        need = self.count + n_more
        if need > MAX_POSITIONS:
            raise ValueError(
                f"{need:,} rows have records of one size, and {MAX_POSITIONS:,} is the most: give some of the tables "
                "another dim"
            )
        self._held.reserve(need)
        if need > self._table.size * 3 // 5:
            # np.zeros touches no pages yet, so the old table is freed before the new one takes memory.
            self._filled = False
            self._table = np.zeros(min(max(need * 5 // 3 + 1, self._table.size * 3 // 2), _MAX_PLACES), np.int32)
            self._fill()

    def _fill(self) -> None:
        """Enter every key in a new table. If a Ctrl-C interrupts it, the next call does it again."""
        if not self._filled:
            _refill(self._table, self._held.array, self.count)
            self._filled = True

    def locate(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        self._fill()
        positions = np.empty(keys.size, np.int32)
        _locate(self._table, self._held.array, keys, positions)
        return positions

    def place(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the position of each key, adding those not held at the next free positions. There must be room."""
        self._fill()
        positions = np.empty(keys.size, np.int32)
        _place(self._table, self._held.array, self._count, keys, positions)
        return positions
