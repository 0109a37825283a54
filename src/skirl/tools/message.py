"""Arrays of numbers packed into one message of bytes. Nothing in it is unpickled."""

import numpy as np
from numpy.typing import NDArray

HEAD = np.dtype([("dtype", "S4"), ("bytes", "<u4")])
"""The head of an array in a message: its dtype, and the bytes that follow."""
ALIGNED = 8
"""Arrays are padded to a multiple of this many bytes, so that each begins at an aligned address."""


def pack(*arrays: NDArray) -> NDArray[np.uint8]:
    """Pack several one-dimensional arrays into one message, for `unpack`."""
    parts = [np.zeros(0, np.uint8)]
    for array in arrays:
        head = np.array([(array.dtype.str.encode(), array.nbytes)], HEAD)
        rest = np.zeros(-array.nbytes % ALIGNED, np.uint8)
        parts += [head.view(np.uint8), np.ascontiguousarray(array).view(np.uint8), rest]
    return np.concatenate(parts)


def unpack(message: NDArray[np.uint8]) -> list[NDArray]:
    """Return the arrays of a message that `pack` made, without copies."""
    arrays, at = [], 0
    while at < len(message):
        (name, size), at = message[at : at + HEAD.itemsize].view(HEAD)[0].tolist(), at + HEAD.itemsize
        arrays.append(message[at : at + size].view(name.decode()))
        at += size + -size % ALIGNED
    return arrays
