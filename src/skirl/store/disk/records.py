"""Records as stored in a file: a row, as 32-bit words, and a checksum of 4 bytes.

The checksum covers the row, its key, its segment and its index there, so it also detects a record in the wrong place.
"""

import os
from typing import Any

import numpy as np
from numba import config, types
from numpy.typing import NDArray

from skirl.tools.jit import kernel

HEADER = 64
"""Number of bytes of a file before its first record or key."""

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
"""A position is a segment's slot and, in the lower bits, the index of the record in it."""

READERS = 16
"""Number of threads that read at once. From this project's test disk, 8 read a fifth fewer rows a second; 32, no more."""
FEW = 256  # rows that one thread reads faster than it wakes another
_RUN = 64 << 10  # most bytes read in one call
_GAP = 2048  # unneeded bytes that are cheaper to read than a second call is

Words = NDArray[np.uint32]
Keys = NDArray[np.int64]
Number = Any
"""A Python or a numpy integer, which are the same inside a kernel."""

_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_C, _D = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
_32, _29 = np.uint64(32), np.uint64(29)


@kernel
def _checksum(words: Words, at: Number, n: int, key: Number, segment: Number, index: Number) -> np.uint32:
    """Return the checksum of `n` words at `words[at:]`, stored as record `index` of a segment."""
    a = (np.uint64(key) ^ _D) * _A
    b = (segment ^ np.uint64(index)) * _B
    c = _C
    d = _D
    last = at + n
    i = at
    while i + 4 <= last:
        a = (a + np.uint64(words[i])) * _A
        b = (b + np.uint64(words[i + 1])) * _B
        c = (c + np.uint64(words[i + 2])) * _C
        d = (d + np.uint64(words[i + 3])) * _D
        i += 4
    while i < last:
        a = (a + np.uint64(words[i])) * _A
        i += 1
    h = (a ^ (a >> _32)) * _B + b
    h = (h ^ (h >> _32)) * _C + c
    h = (h ^ (h >> _32)) * _D + d
    h = (h ^ (h >> _29)) * _A
    return np.uint32(h >> _32)


@kernel
def hash_key(key: Number, state: Number) -> Number:
    state = (state ^ np.uint64(key)) * _A
    return state ^ (state >> _29)


@kernel
def hash_keys(keys: Keys, state: Number) -> Number:
    """Return a running hash of keys in order, starting from np.uint64(0). Python gets an int: make it a np.uint64 again."""
    for i in range(keys.size):
        state = hash_key(keys[i], state)
    return state


@kernel
def encode(rows: Words, width: int, keys: Keys, segment: np.uint64, first: int, out: Words) -> None:
    """Write rows of `width` words to `out` as records first, first + 1, ... of a segment. All arrays are flat."""
    for i in range(keys.size):
        at = i * (width + 1)
        for j in range(width):
            out[at + j] = rows[i * width + j]
        out[at + width] = _checksum(rows, i * width, width, keys[i], segment, first + i)


if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]

    def fill(file: Number, buffer: Words, size: Number, offset: Number) -> int:
        return os.preadv(file, [buffer.view(np.uint8)[:size].data], offset)

else:
    _pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))

    @kernel
    def fill(file: Number, buffer: Words, size: Number, offset: Number) -> int:
        done = 0
        while done < size:
            got = _pread(np.int32(file), buffer.ctypes.data + np.uintp(done), np.uintp(size - done), offset + done)
            if got <= 0:
                break
            done += got
        return done


@kernel
def gather(
    files: NDArray[np.int32],
    segments: NDArray[np.uint64],
    width: int,
    order: NDArray[np.int64],
    positions: NDArray[np.int64],
    keys: Keys,
    out: Words,
    trouble: NDArray[np.int64],
    lo: int,
    hi: int,
) -> None:
    """Read rows order[lo:hi], sorted by position, to flat `out`. If a row cannot be read, set trouble[0] to 1 + row."""
    words = width + 1
    stride = 4 * words
    buffer = np.empty(max(_RUN // 4, words), np.uint32)
    i = lo
    while i < hi:
        position = positions[order[i]]
        slot = position >> INDEX_BITS
        first = position & INDEX_MASK
        last = first
        j = i + 1
        while j < hi:
            position = positions[order[j]]
            index = position & INDEX_MASK
            if position >> INDEX_BITS != slot or (index + 1 - first) * stride > _RUN or (index - last) * stride > _GAP:
                break
            last = index
            j += 1
        came = fill(files[slot], buffer, (last + 1 - first) * stride, HEADER + first * stride)
        for k in range(i, j):
            row = order[k]
            index = positions[row] & INDEX_MASK
            at = (index - first) * words
            if (index + 1 - first) * stride > came or _checksum(
                buffer, at, width, keys[row], segments[slot], index
            ) != buffer[at + width]:
                trouble[0] = row + 1
                return
            for w in range(width):
                out[row * width + w] = buffer[at + w]
        i = j
