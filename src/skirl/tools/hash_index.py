"""A hash index from int64 keys to int32 values, such as the slot or the position of a row."""

import numpy as np
from numpy.typing import NDArray

from skirl.tools.jit import AHEAD, kernel, prefetch

EMPTY = -1
"""Marks a free place in `keys`; no key is -1."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_SALT_LOW, _SALT_HIGH = np.uint64(0x243F6A88), np.uint64(0x85A308D3)
_MUL_LOW, _MUL_HIGH, _MUL_LAST = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)


@kernel
def mix(key: int) -> int:
    """Return 32 well mixed bits of a key, as a non-negative integer.

    A key is a table in the upper bits and a small row in the lower ones: unmixed, the rows of all tables would collide.
    Products are of 32 by 32 bits, so nothing overflows, and plain Python computes the same without a warning.
    """
    x = np.uint64(key)
    low = ((x & _LOW) ^ _SALT_LOW) * _MUL_LOW
    high = ((x >> _HALF) ^ _SALT_HIGH) * _MUL_HIGH
    both = low ^ (high << _HALF) ^ (high >> _HALF)
    last = ((both & _LOW) ^ (both >> _HALF)) * _MUL_LAST
    return np.int64((last ^ (last >> _HALF)) & _LOW)  # pyright: ignore[reportReturnType]


@kernel
def probe(keys: NDArray[np.int64], mask: int, key: int) -> int:
    """Return the place of a key, or the free place where it belongs; `keys[place] == key` tells which."""
    place = mix(key) & mask
    while keys[place] != key and keys[place] != EMPTY:
        place = (place + 1) & mask
    return place


@kernel
def ask(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> None:
    """Fetch the memory that a lookup of this key needs. Called `AHEAD` turns before, it saves a third of the time."""
    place = mix(key) & mask
    prefetch(keys, place)
    prefetch(values, place)


@kernel
def find(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> int:
    place = probe(keys, mask, key)
    if keys[place] == key:
        return values[place]
    return -1


@kernel
def insert(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int, value: int) -> bool:
    """Set the value of a key, and return whether the key is new. There must be room: see `HashIndex.reserve`."""
    place = probe(keys, mask, key)
    new = keys[place] != key
    keys[place] = key
    values[place] = value
    return new


@kernel
def remove(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, key: int) -> int:
    """Remove a key, and return its value, or -1 if it was not in the index.

    Keys after it move back into the hole. So there are no markers of removed keys, and lookups stay as short as in a
    new index, however many keys come and go.
    """
    hole = probe(keys, mask, key)
    if keys[hole] != key:
        return -1
    value = values[hole]
    place = (hole + 1) & mask
    while keys[place] != EMPTY:
        # A key may move back to the hole only if the hole is not before its home, or it would not be found.
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
    added, last = 0, new_keys.size - 1
    for i in range(new_keys.size):
        ask(keys, values, mask, new_keys[min(i + AHEAD, last)])
        fresh = insert(keys, values, mask, new_keys[i], new[i])
        had[i] = not fresh
        added += fresh
    return added


@kernel
def remove_all(keys: NDArray[np.int64], values: NDArray[np.int32], mask: int, old_keys: NDArray[np.int64]) -> int:
    removed, last = 0, old_keys.size - 1
    for i in range(old_keys.size):
        ask(keys, values, mask, old_keys[min(i + AHEAD, last)])
        removed += remove(keys, values, mask, old_keys[i]) != -1
    return removed


@kernel
def _distinct(
    keys: NDArray[np.int64],
    values: NDArray[np.int32],
    wanted: NDArray[np.int64],
    out: NDArray[np.int64],
    place: NDArray[np.int32],
) -> int:
    """Number keys as they first come, put the new ones into `out`, and return how many these are."""
    found, mask, last = 0, keys.size - 1, wanted.size - 1
    for i in range(wanted.size):
        ask(keys, values, mask, wanted[min(i + AHEAD, last)])
        at = probe(keys, mask, wanted[i])
        if keys[at] != wanted[i]:
            keys[at] = out[found] = wanted[i]
            values[at] = found
            found += 1
        place[i] = values[at]
    return found


def distinct(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the distinct keys in the order in which they first come, and the place of each key among them."""
    size = 1 << max(4, (2 * len(keys) - 1).bit_length())
    out, place = np.empty(len(keys), np.int64), np.empty(len(keys), np.int32)
    found = _distinct(np.full(size, EMPTY, np.int64), np.empty(size, np.int32), keys, out, place)
    return out[:found], place


class HashIndex:
    """The two arrays of an index, at most half full, and the number of keys in them.

    Kernels take `.keys`, `.values` and `.mask` and call `find`, `insert` and `remove` on them. They never grow the arrays:
    the caller calls `reserve` before, and adds the new keys to `.count` after. Values must not be negative. An
    index that numbers rows holds at most 2**31 of them.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int32]
    count: int

    def __init__(self) -> None:
        self._allocate(16)
        self.count = 0

    def _allocate(self, size: int) -> None:
        self.keys = np.full(size, EMPTY, np.int64)
        self.values = np.empty(size, np.int32)

    @property
    def mask(self) -> int:
        """The size less one; the size is a power of two, so `& mask` wraps a place around the end."""
        return self.keys.size - 1

    def __len__(self) -> int:
        return self.count

    def reserve(self, n_more: int) -> None:
        """Make room for `n_more` more keys. When the arrays grow they are replaced, and at least double."""
        places = 2 * int(self.count + n_more)  # a kernel that is not compiled counts in numpy's integers
        if places <= self.keys.size:
            return
        there = self.keys != EMPTY
        keys, values = self.keys[there], self.values[there]
        self._allocate(1 << (places - 1).bit_length())
        insert_all(self.keys, self.values, self.mask, keys, values, np.empty(len(keys), np.bool_))

    def get(self, keys: NDArray[np.int64]) -> NDArray[np.int32]:
        out = np.empty(len(keys), np.int32)
        find_all(self.keys, self.values, self.mask, keys, out)
        return out

    def put(self, keys: NDArray[np.int64], values: NDArray[np.int32]) -> NDArray[np.bool_]:
        self.reserve(len(keys))
        had = np.empty(len(keys), np.bool_)
        self.count += insert_all(self.keys, self.values, self.mask, keys, values, had)
        return had

    def drop(self, keys: NDArray[np.int64]) -> None:
        self.count -= remove_all(self.keys, self.values, self.mask, keys)
