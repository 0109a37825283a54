"""A hash index from keys to int32 values: which slot, or which position, a row has.

Open addressing over two plain arrays, at most half full: a lookup probes 1.5 places on average when the key is there
and 2.5 when it is not, for 24 to 48 bytes a key. The functions are Numba kernels over those arrays and call each other,
so a planner looks up and changes some 10 million keys a second and core without the interpreter; they never grow the
arrays, the caller makes room before it enters the kernel. A Python dict costs about 100 bytes a key, holds the
interpreter lock and cannot be used inside a kernel; numba.typed.Dict can, and pays for a generic layout and reference
counts at every call.

Values are int32, so an index that numbers rows holds at most 2**31 of them.
"""

import numpy as np
from numpy.typing import NDArray

from skirl.tools.jit import AHEAD, kernel, prefetch

EMPTY = -1
"""Marks a free place in `keys`; keys themselves are never negative."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SALT_LOW, _SALT_HIGH = np.uint64(0x243F6A88), np.uint64(0x85A308D3)
_MUL_LOW, _MUL_HIGH, _MUL_LAST = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)


@kernel
def mix(key: int) -> int:
    """32 well spread bits of a key, as a non-negative integer.

    Keys are a table in the upper bits and small dense rows in the lower ones: taken as they are, all tables would
    collide. Products are 32 by 32 bits, so nothing overflows and plain Python computes the same without a warning.
    """
    x = np.uint64(key)
    low = ((x & _LOW) ^ _SALT_LOW) * _MUL_LOW
    high = ((x >> _HALF) ^ _SALT_HIGH) * _MUL_HIGH
    both = low ^ (high << _HALF) ^ (high >> _HALF)
    last = ((both & _LOW) ^ (both >> _HALF)) * _MUL_LAST
    return np.int64((last ^ (last >> _HALF)) & _LOW)  # pyright: ignore[reportReturnType]


@kernel
def probe(keys: NDArray[np.int64], mask: int, key: int) -> int:
    """The place of a key, or the free place where it belongs: `keys[place] == key` tells which."""
    place = mix(key) & mask
    while keys[place] != key and keys[place] != EMPTY:
        place = (place + 1) & mask
    return place


@kernel
def ask(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> None:
    """Ask for the memory that a look-up of this key will need: asked `AHEAD` turns before, it saves a third."""
    place = mix(key) & mask
    prefetch(keys, place)
    prefetch(values, place)


@kernel
def find(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> int:
    """The value of a key, -1 when it is not held."""
    place = probe(keys, mask, key)
    if keys[place] == key:
        return values[place]
    return -1


@kernel
def insert(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int, value: int) -> bool:
    """Set the value of a key; True when the key is new. There must be room: see `HashIndex.reserve`."""
    place = probe(keys, mask, key)
    new = keys[place] != key
    keys[place] = key
    values[place] = value
    return new


@kernel
def remove(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> int:
    """Take a key out; its value, -1 when it was not held.

    Later keys of the run move back into the hole, so no markers of the dead pile up and lookups stay as short as in a
    fresh index, however many keys come and go.
    """
    hole = probe(keys, mask, key)
    if keys[hole] != key:
        return -1
    value = values[hole]
    place = (hole + 1) & mask
    while keys[place] != EMPTY:
        # A key may move back to the hole only if the hole is not before its home: it would not be found there.
        home = mix(keys[place]) & mask
        if ((place - home) & mask) >= ((place - hole) & mask):
            keys[hole] = keys[place]
            values[hole] = values[place]
            hole = place
        place = (place + 1) & mask
    keys[hole] = EMPTY
    return value


@kernel
def find_all(
    keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, wanted: NDArray[np.int64], out: NDArray[np.int32]
) -> None:
    """`find` for many keys."""
    last = wanted.size - 1
    for i in range(wanted.size):
        ask(keys, values, mask, wanted[min(i + AHEAD, last)])
        out[i] = find(keys, values, mask, wanted[i])


@kernel
def insert_all(
    keys: NDArray[np.int64],
    values: NDArray[np.int32],
    mask: int,
    new_keys: NDArray[np.int64],
    new: NDArray[np.int32],
    had: NDArray[np.bool_],
) -> int:
    """`insert` for many keys; had: which were there. How many were not."""
    added, last = 0, new_keys.size - 1
    for i in range(new_keys.size):
        ask(keys, values, mask, new_keys[min(i + AHEAD, last)])
        fresh = insert(keys, values, mask, new_keys[i], new[i])
        had[i] = not fresh
        added += fresh
    return added


@kernel
def remove_all(
    keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, old_keys: NDArray[np.int64], out: NDArray[np.int32]
) -> int:
    """`remove` for many keys; how many were held."""
    removed, last = 0, old_keys.size - 1
    for i in range(old_keys.size):
        ask(keys, values, mask, old_keys[min(i + AHEAD, last)])
        out[i] = remove(keys, values, mask, old_keys[i])
        if out[i] != -1:
            removed += 1
    return removed


@kernel
def _rehash(
    keys: NDArray[np.int64], values: NDArray[np.int32], to_keys: NDArray[np.int64], to_values: NDArray[np.int32]
) -> None:
    mask = to_keys.size - 1
    for i in range(keys.size):
        if keys[i] != EMPTY:
            place = probe(to_keys, mask, keys[i])
            to_keys[place] = keys[i]
            to_values[place] = values[i]


class HashIndex:
    """The two arrays of an index and how many keys they hold.

    Kernels take `.keys`, `.values` and `.mask` and call `find`, `insert` and `remove` on them; whoever does so calls
    `reserve` first and adds what was new to `.count` afterwards. Keys and values must not be negative.

    >>> index = HashIndex()
    >>> index.put(np.array([7, 1 << 48]), np.array([0, 1], np.int32))
    2
    >>> index.get(np.array([1 << 48, 8]))
    array([ 1, -1], dtype=int32)
    >>> index.drop(np.array([7])), len(index)
    (array([0], dtype=int32), 1)
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int32]
    count: int

    def __init__(self, capacity_hint: int = 0) -> None:
        self._allocate(capacity_hint)
        self.count = 0

    def _allocate(self, room: int) -> None:
        size = max(16, 1 << (2 * room - 1).bit_length()) if room else 16
        self.keys = np.full(size, EMPTY, np.int64)
        self.values = np.empty(size, np.int32)

    @property
    def mask(self) -> int:
        """Size - 1, a power of two less one: `& mask` wraps a place around the end."""
        return self.keys.size - 1

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self.keys.nbytes + self.values.nbytes

    def __len__(self) -> int:
        return self.count

    def reserve(self, n_more: int) -> None:
        """Make room for `n_more` further keys; the arrays are replaced when they grow, their size at least doubles."""
        if 2 * (self.count + n_more) <= self.keys.size:
            return
        keys, values = self.keys, self.values
        self._allocate(self.count + n_more)
        _rehash(keys, values, self.keys, self.values)

    def clear(self) -> None:
        """Forget all keys, keep the room."""
        self.keys.fill(EMPTY)
        self.count = 0

    def get(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """The value of each key, -1 where it is not held."""
        out = np.empty(len(keys), np.int32)
        find_all(self.keys, self.values, self.mask, keys, out)
        return out

    def put(self, keys: NDArray[np.int64], values: NDArray[np.int32]) -> int:
        """Set the value of each key; how many were new."""
        return int((~self.claim(keys, values)).sum())

    def claim(self, keys: NDArray[np.int64], values: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Set the value of each key; which were there."""
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys and {len(values)} values given: pass one value a key")
        if len(keys) and (keys.min() < 0 or values.min() < 0):
            raise ValueError("keys and values must not be negative: -1 marks what is not there")
        self.reserve(len(keys))
        had = np.empty(len(keys), np.bool_)
        self.count += insert_all(self.keys, self.values, self.mask, keys, values, had)
        return had

    def drop(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        """Take each key out; its value, -1 where it was not held."""
        out = np.empty(len(keys), np.int32)
        self.count -= remove_all(self.keys, self.values, self.mask, keys, out)
        return out
