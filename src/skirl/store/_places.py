"""Where the newest record of each key stands: key to position, in 14.1 to 15.8 bytes a row.

Keys pass a bijection of 64 bits and stand sorted by the result, with gaps: each at its share of the table or as soon after
it as there is room. One array of 8 bytes and one of 4, between 76 and 85% full, and nothing beside them: unlike
`_directory.py`, whose positions never change, a log moves its rows, so keys cannot stand in order of position. Being sorted
it grows in place, by an eighth, in three passes that run through memory in order; a table that is filled anew would be
there twice for a moment. Found after 3.8 places on average when 85% full, which is one or two cache lines.

Not taken: positions and 8 bits of each key, with the rest checked on disk, is 6 to 7 bytes a row, and makes every write
wait for a random read (15,000 a second, one at a time) where a log needs none.
"""

import numpy as np
from numpy.typing import NDArray

from skirl.jit import kernel
from skirl.store._arena import Arena
from skirl.store._records import INDEX_BITS, Keys, Number, hash_keys

_FULL, _AFTER_GROWTH = 0.85, 0.765
_PAD = 1 << 16  # room behind the table for what does not fit at its end; pages not touched take no memory
_FIRST = 1024
_MOST = (1 << 32) - 1  # a share of the table is 32 bits
MOST_PLACED = 1 << 15
"""Keys that one `place` takes."""

_33, _32 = np.uint64(33), np.uint64(32)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_NONE, _ONE = np.uint64(0), np.uint64(1)

Hashes = NDArray[np.uint64]
Positions = NDArray[np.uint32]


@kernel
def _hash(key: Number) -> np.uint64:
    """MurmurHash3's last step: a bijection, and never 0 for a key, so that 0 marks a gap."""
    x = np.uint64(key) + _ONE
    x = (x ^ (x >> _33)) * _M1
    x = (x ^ (x >> _33)) * _M2
    return x ^ (x >> _33)


@kernel
def _find(hashes: Hashes, size: int, x: Number) -> Number:
    """The place of a hash, or the one where it belongs."""
    place = np.int64(((x >> _32) * np.uint64(size)) >> _32)
    while hashes[place] != _NONE and hashes[place] < x:
        place += 1
    return place


@kernel
def _locate(hashes: Hashes, positions: Positions, size: int, keys: Keys, out: NDArray[np.int64]) -> None:
    for i in range(keys.size):
        x = _hash(keys[i])
        place = _find(hashes, size, x)
        out[i] = positions[place] if hashes[place] == x else -1


@kernel
def _standing(hashes: Hashes, positions: Positions, size: int, keys: Keys, first: int, out: NDArray[np.bool_]) -> None:
    for i in range(keys.size):
        x = _hash(keys[i])
        place = _find(hashes, size, x)
        out[i] = hashes[place] == x and positions[place] == first + i


@kernel
def _place(
    hashes: Hashes,
    positions: Positions,
    size: int,
    count: NDArray[np.int64],
    keys: Keys,
    first: int,
    ends: NDArray[np.int64],
    live: NDArray[np.int64],
    sums: NDArray[np.uint64],
) -> None:
    for i in range(keys.size):
        x = _hash(keys[i])
        place = _find(hashes, size, x)
        if hashes[place] == x:
            live[positions[place] >> INDEX_BITS] -= 1
        else:
            gap = place
            while hashes[gap] != _NONE:
                gap += 1
            while gap > place:
                hashes[gap] = hashes[gap - 1]
                positions[gap] = positions[gap - 1]
                gap -= 1
            hashes[place] = x
            count[0] += 1
        positions[place] = first + i
    # Counted in here, so that no Ctrl-C can come between a key and what counts it.
    slot = first >> INDEX_BITS
    live[slot] += keys.size
    ends[slot] += keys.size
    sums[slot] = hash_keys(keys, sums[slot])


@kernel
def _reach(hashes: Hashes, room: int, size: int) -> Number:
    """The first place behind everything, were the table of this size."""
    after = 0
    for i in range(room):
        if hashes[i] != _NONE:
            place = np.int64(((hashes[i] >> _32) * np.uint64(size)) >> _32)
            after = max(place, after) + 1
    return after


@kernel
def _spread(hashes: Hashes, positions: Positions, shape: NDArray[np.int64], size: int, new_room: int) -> None:
    """To a larger size, in place: all to the end, then each to its place, which is never behind where it comes from."""
    to = new_room
    for i in range(shape[1] - 1, -1, -1):
        x = hashes[i]
        if x != _NONE:
            to -= 1
            hashes[i] = _NONE
            hashes[to] = x
            positions[to] = positions[i]
    after = 0
    for i in range(to, new_room):
        x = hashes[i]
        place = max(np.int64(((x >> _32) * np.uint64(size)) >> _32), after)
        hashes[i] = _NONE
        hashes[place] = x
        positions[place] = positions[i]
        after = place + 1
    shape[0] = size
    shape[1] = new_room


class Places:
    """The position of each key. Not safe for threads: the gate is.

    >>> places, arrays = Places(), [np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.uint64)]
    >>> places.reserve(2)
    >>> places.place(np.array([70, 50]), 0, *arrays)
    >>> places.locate(np.array([50, 60]))
    array([ 1, -1])
    """

    def __init__(self) -> None:
        # Arrays, so that kernels set them: no Ctrl-C can come between the table and what is said of it.
        self._count = np.zeros(1, np.int64)
        self._shape = np.array([_FIRST, _FIRST + _PAD])  # the size that shares are of, and the room with what is behind
        self._hashes = Arena(np.uint64)
        self._positions = Arena(np.uint32)
        self._hashes.reserve(self._room)
        self._positions.reserve(self._room)

    @property
    def count(self) -> int:
        """How many keys are held."""
        return int(self._count[0])

    @property
    def nbytes(self) -> int:
        """Bytes of memory that may be in use."""
        return 12 * self._room

    @property
    def _size(self) -> int:
        return int(self._shape[0])

    @property
    def _room(self) -> int:
        return int(self._shape[1])

    def reserve(self, n_more: int) -> None:
        """Make room for `n_more` further keys, MOST_PLACED at most."""
        need = self.count + n_more
        at_end = bool(self._hashes.array[self._room - n_more - 1 : self._room].any())
        if need > self._size * _FULL:
            self._grow(int(need / _AFTER_GROWTH) + 1)
        elif at_end:
            self._grow(self._size)

    def _grow(self, size: int) -> None:
        if size > _MOST:
            raise ValueError(f"{self.count:,} rows of one kind are the most here: give some tables another dim")
        room = _reach(self._hashes.array, self._room, size) + _PAD  # keys need not be random, so it is counted
        room = max(room, size + _PAD, self._room)
        self._hashes.reserve(room)
        self._positions.reserve(room)
        _spread(self._hashes.array, self._positions.array, self._shape, size, room)

    def locate(self, keys: Keys) -> NDArray[np.int64]:
        """The position of each key, -1 where it is not held."""
        out = np.empty(keys.size, np.int64)
        _locate(self._hashes.array, self._positions.array, self._size, keys, out)
        return out

    def standing(self, keys: Keys, first: int) -> NDArray[np.int64]:
        """Those i whose key's position is first + i: its newest record."""
        out = np.empty(keys.size, np.bool_)
        _standing(self._hashes.array, self._positions.array, self._size, keys, first, out)
        return np.flatnonzero(out)

    def place(
        self, keys: Keys, first: int, ends: NDArray[np.int64], live: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> None:
        """Keys stand at first, first + 1, ... from now on; there must be room.

        By slot: ends counts records, live those that are the newest of their key, sums is the running hash of keys.
        """
        _place(self._hashes.array, self._positions.array, self._size, self._count, keys, first, ends, live, sums)
