"""The position of each key's newest record, in 6.7 to 7.4 bytes per row if the sizes of the tables are known: a hash table
sorted by hash, with gaps. A key's *share* is the place in proportion to its hash; the key is there or soon after it. So
its place tells most bits of its hash, and only the lower 16, 32 or 64 bits are kept."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from skirl.core.keys import MAX_ROWS, ROW_BITS, row_of, table_of
from skirl.store.arena import Arena
from skirl.store.disk.records import INDEX_BITS, Keys, Number, hash_key
from skirl.tools.jit import kernel, read_only

_FULL, _AFTER_GROWTH = 0.9, 0.818
_PAD = 1 << 16  # room past the table for what does not fit at its end; pages not touched take no memory
_FIRST = 1024
_MOST = (1 << 32) - 1  # a share of the table is 32 bits
_BLOCK = 1 << 16  # places moved at a time when it grows
_FARTHEST = 256  # places that a key may have to be from its share; in 100 million keys the most by chance is about 60
MOST_PLACED = 1 << 15

_32 = np.uint64(32)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_LOW, _ALL = np.uint64(0xFFFFFFFF), np.uint64(0xFFFFFFFFFFFFFFFF)
_SIZE, _ROOM, _BITS, _LIMIT = 0, 1, 2, 3  # in the shape of a table

Words = NDArray[np.uint16] | NDArray[np.uint32] | NDArray[np.uint64]
Positions = NDArray[np.uint32]
"""Positions plus 1; 0 marks a gap."""
Shape = NDArray[np.int64]
"""Size that shares refer to; room, including that past the size; bits of a hash; how far a key may be from its share."""


@kernel
def _number(key: Number, base: NDArray[np.int64]) -> Number:
    """Return the number of a row among the rows of all tables."""
    return base[key >> ROW_BITS] + (key & (MAX_ROWS - 1))


@kernel
def _is_row(key: Number, base: NDArray[np.int64]) -> Number:
    table, row = key >> ROW_BITS, key & (MAX_ROWS - 1)
    return 0 <= table < base.size - 1 and row < base[table + 1] - base[table]


@kernel
def _stranger(keys: Keys, base: NDArray[np.int64]) -> Number:
    for i in range(keys.size):
        if not _is_row(keys[i], base):
            return i
    return -1


@kernel
def _hash(number: Number, bits: Number) -> Number:
    """Hash a number of `bits` bits to another, one to one, in the way of MurmurHash3's last step."""
    mask = _ALL >> np.uint64(64 - bits)
    half = np.uint64((bits + 1) >> 1)
    x = np.uint64(number)
    x = ((x ^ (x >> half)) * _M1) & mask
    x = ((x ^ (x >> half)) * _M2) & mask
    return x ^ (x >> half)


@kernel
def _share(x: Number, bits: Number, size: Number) -> Number:
    """Return the place that a hash would have in an otherwise empty table of this size."""
    return np.int64((((x << np.uint64(64 - bits)) >> _32) * np.uint64(size)) >> _32)


@kernel
def _find(words: Words, positions: Positions, shape: Shape, x: Number) -> Number:
    """Return the place of a hash, or the place where it would be inserted."""
    kept, bits = 8 * words.itemsize, shape[_BITS]
    mine = x & (_ALL >> np.uint64(64 - kept))
    place = _share(x, bits, shape[_SIZE])
    if kept >= bits:
        while positions[place] != 0 and words[place] < mine:
            place += 1
    else:
        # Hashes here are near each other, so the sign of the difference of their kept bits tells which one is less.
        sign = np.uint64(kept - 1)
        while positions[place] != 0 and ((np.uint64(words[place]) - mine) >> sign) & np.uint64(1) != 0:
            place += 1
    return place


@kernel
def _is_at(words: Words, positions: Positions, place: Number, x: Number) -> Number:
    kept = _ALL >> np.uint64(64 - 8 * words.itemsize)
    return positions[place] != 0 and np.uint64(words[place]) == x & kept


@kernel
def _whole(words: Words, place: Number, shape: Shape) -> Number:
    word, kept, bits = np.uint64(words[place]), 8 * words.itemsize, shape[_BITS]
    if kept >= bits:
        return word
    last = _LOW  # upper bits of the largest hash whose share is this place
    if place + 1 < shape[_SIZE]:
        size = np.uint64(shape[_SIZE])
        last = ((np.uint64(place + 1) << _32) + size - np.uint64(1)) // size - np.uint64(1)
    last = ((last << _32) | _LOW) >> np.uint64(64 - bits)
    return last - ((last - word) & (_ALL >> np.uint64(64 - kept)))


@kernel
def _locate(
    words: Words, positions: Positions, shape: Shape, base: NDArray[np.int64], keys: Keys, out: NDArray[np.int64]
) -> None:
    for i in range(keys.size):
        out[i] = -1
        if _is_row(keys[i], base):
            x = _hash(_number(keys[i], base), shape[_BITS])
            place = _find(words, positions, shape, x)
            if _is_at(words, positions, place, x):
                out[i] = np.int64(positions[place]) - 1


@kernel
def _too_far(words: Words, shape: Shape, place: Number, gap: Number, share: Number) -> Number:
    """Return whether a key would be too far from its share if all keys from `place` up to the gap moved by one."""
    if gap - share <= shape[_LIMIT]:
        return False
    if place - share > shape[_LIMIT]:
        return True
    for at in range(place, gap):
        if at + 1 - _share(_whole(words, at, shape), shape[_BITS], shape[_SIZE]) > shape[_LIMIT]:
            return True
    return False


@kernel
def _place(
    words: Words,
    positions: Positions,
    shape: Shape,
    base: NDArray[np.int64],
    count: NDArray[np.int64],
    keys: Keys,
    done: Number,
    first: Number,
    ends: NDArray[np.int64],
    live: NDArray[np.int64],
    sums: NDArray[np.uint64],
) -> Number:
    """Place keys from `done` on. Return how many are placed by then: not all, if a key would be too far from its share."""
    slot = first >> INDEX_BITS
    kept = _ALL >> np.uint64(64 - 8 * words.itemsize)
    for i in range(done, keys.size):
        x = _hash(_number(keys[i], base), shape[_BITS])
        place = _find(words, positions, shape, x)
        if _is_at(words, positions, place, x):
            live[(np.int64(positions[place]) - 1) >> INDEX_BITS] -= 1
        else:
            gap = place
            while positions[gap] != 0:
                gap += 1
            if _too_far(words, shape, place, gap, _share(x, shape[_BITS], shape[_SIZE])):
                return i
            while gap > place:
                words[gap] = words[gap - 1]
                positions[gap] = positions[gap - 1]
                gap -= 1
            words[place] = x & kept
            count[0] += 1
        positions[place] = first + i + 1
        # Counted in the kernel, so that no Ctrl-C can come between placing a key and counting it.
        live[slot] += 1
        ends[slot] += 1
        sums[slot] = hash_key(keys[i], sums[slot])
    return keys.size


@kernel
def _survey(
    words: Words,
    positions: Positions,
    shape: Shape,
    size: Number,
    block_size: Number,
    starts: NDArray[np.int64],
    found: NDArray[np.int64],
) -> None:
    """Compute where each block of old places would start if the table had this size.

    found: the first place past all keys, the farthest that a key would be from its share, and whether a key would move to
    a block before its own.
    """
    after = 0
    found[:] = 0
    for block in range(starts.size):
        starts[block] = after
        for place in range(block * block_size, min((block + 1) * block_size, shape[_ROOM])):
            if positions[place] != 0:
                share = _share(_whole(words, place, shape), shape[_BITS], size)
                after = max(share, after)
                found[1] = max(found[1], after - share)
                if after < block * block_size:
                    found[2] = 1
                after += 1
    found[0] = after


@kernel
def _spread(
    words: Words, positions: Positions, shape: Shape, new: Shape, starts: NDArray[np.int64], hashes: NDArray[np.uint64]
) -> None:
    """Move to another shape in place, block by block from the end, so that no key overwrites one that is not moved yet.

    hashes: room for the hashes of one block.
    """
    block_size = hashes.size
    kept = _ALL >> np.uint64(64 - 8 * words.itemsize)
    held = np.empty(block_size, np.uint32)
    for block in range(starts.size - 1, -1, -1):
        n = 0
        for place in range(block * block_size, min((block + 1) * block_size, shape[_ROOM])):
            if positions[place] != 0:
                hashes[n] = _whole(words, place, shape)
                held[n] = positions[place]
                positions[place] = 0
                n += 1
        after = starts[block]
        for i in range(n):
            place = max(_share(hashes[i], shape[_BITS], new[_SIZE]), after)
            words[place] = hashes[i] & kept
            positions[place] = held[i]
            after = place + 1
    for i in range(shape.size):  # assigning to a slice takes seconds to compile
        shape[i] = new[i]


@kernel
def _copy(words: Words, positions: Positions, shape: Shape, to: Words, to_positions: Positions, new: Shape) -> None:
    """Copy to an empty table of another shape, which may keep more or fewer bits of each hash."""
    kept = _ALL >> np.uint64(64 - 8 * to.itemsize)
    after = 0
    for place in range(shape[_ROOM]):
        if positions[place] != 0:
            x = _whole(words, place, shape)
            after = max(_share(x, shape[_BITS], new[_SIZE]), after)
            to[after] = x & kept
            to_positions[after] = positions[place]
            after += 1


class _Table:
    def __init__(self, kept: int, shape: Shape) -> None:
        self.kept = kept
        self.shape = shape  # an array, so that the kernel that moves keys sets it, and no Ctrl-C can come in between
        self._words = Arena(f"uint{kept}")
        self._positions = Arena(np.uint32)
        self.reserve(int(shape[_ROOM]))

    def reserve(self, room: int) -> None:
        self._words.reserve(room, spare=0)
        self._positions.reserve(room, spare=0)

    @property
    def arrays(self) -> tuple[Words, Positions, Shape]:
        return self._words.array, self._positions.array, self.shape


class KeyIndex:
    """The position of each key. Not thread-safe: the gate makes threads take turns."""

    def __init__(self, rows: Mapping[int, int]) -> None:
        self._rows = rows
        each = [rows.get(table, 0) for table in range(max(rows, default=-1) + 1)]
        self._base = np.cumsum([0, *each], dtype=np.int64)
        self._bits = max(1, (int(self._base[-1]) - 1).bit_length())
        self._count = np.zeros(1, np.int64)
        self._least_kept = 16
        kept = self._keeps(_FIRST)
        self._table = _Table(kept, self._shape(kept, _FIRST, _FIRST + _PAD))

    @property
    def count(self) -> int:
        return int(self._count[0])

    def _limit(self, kept: int, size: int) -> int:
        """Return how far a key may be from its share so that the kept bits still tell nearby hashes apart."""
        if kept >= self._bits:
            return _MOST
        return (1 << (kept - 1)) // -(-(1 << self._bits) // size) - 2

    def _keeps(self, size: int) -> int:
        return next(k for k in (16, 32, 64) if k >= self._least_kept and self._limit(k, size) >= _FARTHEST)

    def _shape(self, kept: int, size: int, room: int) -> Shape:
        return np.array([size, room, self._bits, self._limit(kept, size)], np.int64)

    def beyond(self, keys: Keys) -> str | None:
        if (at := _stranger(read_only(keys), self._base)) < 0:
            return None
        rows = self._rows.get(int(table_of(keys[at])), 0)
        return f"{named(int(keys[at]))} is beyond the {rows:,} rows that it has here"

    def reserve(self, n_more: int) -> None:
        need = self.count + n_more
        if need > self._table.shape[_SIZE] * _FULL:
            self._grow(int(need / _AFTER_GROWTH) + 1)
        size, room = self._table.shape[:_BITS].tolist()
        at_end = self._table.arrays[1][max(0, room - n_more - 1) : room].any()
        if at_end or room <= size + n_more:
            more = _PAD + n_more  # all of them may belong at the end
            self._table.reserve(room + more)
            self._table.shape[_ROOM] += more

    def _grow(self, size: int) -> None:
        """Grow to a larger size, or keep more bits of each hash."""
        if size > _MOST:
            raise ValueError(
                f"{self.count:,} rows are the maximum for records of one size: give some of the tables another dim"
            )
        table, found = self._table, np.empty(3, np.int64)
        before = int(table.shape[_ROOM])
        starts = np.empty(-(-before // _BLOCK), np.int64)
        _survey(*table.arrays, size, _BLOCK, starts, found)
        after, farthest, back = found.tolist()
        kept = self._keeps(size)
        while farthest > self._limit(kept, size):
            kept *= 2
        room = max(after, size, before - _PAD) + _PAD  # `after` is counted, since keys need not be random
        shape = self._shape(kept, size, room)
        if kept == table.kept and not back:
            table.reserve(room)
            _spread(*table.arrays, shape, starts, np.empty(_BLOCK, np.uint64))
        else:
            new = _Table(kept, shape)
            _copy(*table.arrays, *new.arrays)
            self._table = new

    def locate(self, keys: Keys) -> NDArray[np.int64]:
        out = np.empty(keys.size, np.int64)
        _locate(*self._table.arrays, self._base, read_only(keys), out)
        return out

    def standing(self, keys: Keys, first: int) -> NDArray[np.int64]:
        """Return each i for which the newest record of keys[i] is at first + i."""
        return np.flatnonzero(self.locate(keys) == first + np.arange(keys.size))

    def place(
        self, keys: Keys, first: int, ends: NDArray[np.int64], live: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> None:
        """Set the positions of keys, all of them rows of the tables, to first, first + 1, ... There must be room.

        By slot, `ends` counts records, `live` counts those that are their key's newest, and `sums` has the running hash of
        keys.
        """
        done, keys = 0, read_only(keys)
        while True:
            done = int(_place(*self._table.arrays, self._base, self._count, keys, done, first, ends, live, sums))
            if done == keys.size:
                return
            self._least_kept = 2 * self._table.kept
            self._grow(int(self._table.shape[_SIZE]))


def named(key: int) -> str:
    return f"row {row_of(int(key))} of table {table_of(int(key))}"
