"""Messages of an exchange: heads that say what a message is for and how long it is, and arrays packed into one message."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEAD = np.dtype([("sequence", "<i8"), ("bytes", "<i8"), ("dtype", "S16"), ("tag", "S96")])
"""The head of a message: the number of the exchange, the size and dtype of what follows, and what it is for."""
ALIGNED = 16
"""Messages are padded to a multiple of this many bytes, so that each array starts at an aligned address."""
KINDS = "biufc"
"""Kinds of dtypes that may be sent: bool, integers, floats, complex. No objects, so nothing is unpickled."""


@dataclass(frozen=True)
class Head:
    """The head of one message, read and checked."""

    sequence: int
    """Number of the exchange on its channel."""
    bytes: int
    """Number of bytes that follow."""
    dtype: np.dtype
    """Dtype of what follows."""
    tag: str
    """The purpose of the message."""


def heads(arrays: Sequence[NDArray], sequence: int, tag: str) -> NDArray[np.uint8]:
    """Return the heads of the messages to each rank: [ranks, HEAD.itemsize]."""
    head = np.zeros(len(arrays), HEAD)
    head["sequence"], head["tag"] = sequence, tag.encode()[: HEAD["tag"].itemsize]
    head["bytes"] = [array.nbytes for array in arrays]
    head["dtype"] = [array.dtype.str.encode() for array in arrays]
    return head.view(np.uint8).reshape(len(arrays), HEAD.itemsize)


def read_head(raw: NDArray[np.uint8]) -> Head:
    """Parse a head that was received. Raise a ValueError if it is none."""
    head = raw.view(HEAD)[0]
    size, name, tag = int(head["bytes"]), head["dtype"].decode("ascii"), head["tag"].decode(errors="replace")
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ValueError(f"{name!r} is no kind of numbers") from None
    if dtype.kind not in KINDS or dtype.itemsize == 0:
        raise ValueError(f"{name!r} is no kind of numbers")
    if size < 0 or size % dtype.itemsize:
        raise ValueError(f"{size} bytes are not a whole number of {name!r}")
    return Head(int(head["sequence"]), size, dtype, tag)


def padded(size: int) -> int:
    """Return the bytes of a message with padding.

    >>> padded(0), padded(1), padded(16)
    (0, 16, 16)
    """
    return -(-size // ALIGNED) * ALIGNED


def pack(*arrays: NDArray) -> NDArray[np.uint8]:
    """Pack several one-dimensional arrays into one message, for `unpack`.

    >>> [part.tolist() for part in unpack(pack(np.arange(3), np.array([0.5]), np.zeros(0, np.int8)))]
    [[0, 1, 2], [0.5], []]
    """
    table = heads(arrays, len(arrays), "").reshape(-1) if arrays else np.zeros(0, np.uint8)
    parts = [np.frombuffer(np.int64(len(arrays)).tobytes() + bytes(8), np.uint8), table]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [flat, np.zeros(padded(array.nbytes) - array.nbytes, np.uint8)]
    return np.concatenate(parts)


def unpack(message: NDArray[np.uint8]) -> list[NDArray]:
    """Return the arrays of a message, without copies. Raise a ValueError if `pack` did not make it."""
    count = int(message[:8].view("<i8")[0]) if len(message) >= ALIGNED else -1
    if not 0 <= count <= (len(message) - ALIGNED) // HEAD.itemsize:
        raise ValueError(f"a message of {len(message)} bytes does not begin as packed arrays do")
    at = ALIGNED + count * HEAD.itemsize
    arrays = []
    for n in range(count):
        head = read_head(message[ALIGNED + n * HEAD.itemsize : ALIGNED + (n + 1) * HEAD.itemsize])
        if head.bytes > len(message) - at:
            raise ValueError(f"array {n} of a message has {head.bytes} bytes, and {len(message) - at} are left")
        arrays.append(message[at : at + head.bytes].view(head.dtype))
        at += padded(head.bytes)
    if at != len(message):
        raise ValueError(f"a message has {len(message)} bytes, and its arrays {at}")
    return arrays
