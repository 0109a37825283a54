"""What travels with an exchange: who calls for what, and how much follows; and arrays packed into one message."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HEAD = np.dtype([("sequence", "<i8"), ("bytes", "<i8"), ("dtype", "S16"), ("tag", "S96")])
"""The head of a message: which exchange of the channel it is of, what follows it, and what for."""
ALIGNED = 16
"""Bytes whose multiples messages fill, so that every array of them begins where its numbers may lie."""
KINDS = "biufc"
"""Kinds of numbers that travel: whole numbers, floats, bools. No objects: nothing is unpickled."""


@dataclass(frozen=True)
class Head:
    """The head of one message, read and checked."""

    sequence: int
    """Which exchange of the channel it is of."""
    bytes: int
    """How much follows."""
    dtype: np.dtype
    """What it is."""
    tag: str
    """What for."""


def heads(arrays: Sequence[NDArray], sequence: int, tag: str) -> NDArray[np.uint8]:
    """The head of each rank's message: [ranks, HEAD.itemsize].

    **Arguments**

    - `arrays`: what is sent to each rank.
    - `sequence`: which exchange of the channel this is.
    - `tag`: what for; the first 96 bytes of it travel.
    """
    head = np.zeros(len(arrays), HEAD)
    head["sequence"], head["tag"] = sequence, tag.encode()[: HEAD["tag"].itemsize]
    head["bytes"] = [array.nbytes for array in arrays]
    head["dtype"] = [array.dtype.str.encode() for array in arrays]
    return head.view(np.uint8).reshape(len(arrays), HEAD.itemsize)


def read_head(raw: NDArray[np.uint8]) -> Head:
    """A head as it came; ValueError where it is none.

    **Arguments**

    - `raw`: its bytes.
    """
    head = raw.view(HEAD)[0]
    size, name, tag = int(head["bytes"]), head["dtype"].decode("ascii"), head["tag"].decode(errors="replace")
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise ValueError(f"{name!r} is no kind of numbers") from None
    if dtype.kind not in KINDS or dtype.itemsize == 0:
        raise ValueError(f"{name!r} is no kind of numbers")
    if size < 0 or size % dtype.itemsize:
        raise ValueError(f"{size} bytes are no whole number of {name!r}")
    return Head(int(head["sequence"]), size, dtype, tag)


def padded(size: int) -> int:
    """Bytes that a message takes on its way.

    >>> padded(0), padded(1), padded(16)
    (0, 16, 16)
    """
    return -(-size // ALIGNED) * ALIGNED


def pack(*arrays: NDArray) -> NDArray[np.uint8]:
    """Several arrays of one dimension as one message; `unpack` gives them back.

    **Arguments**

    - `arrays`: of numbers, of any lengths.

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
    """The arrays of a message, without copies; ValueError where it is not what `pack` makes.

    **Arguments**

    - `message`: its bytes.
    """
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
