"""Rows of half precision as stores and checkpoints see them: float32 words used as plain bits, two numbers in each."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

HALVES = (torch.float16, torch.bfloat16)


def words(width: int) -> int:
    """Return how many words a record of `width` numbers takes; if `width` is odd, half a word is unused.

    >>> words(64), words(65)
    (32, 33)
    """
    return (width + 1) // 2


def expanded(records: NDArray[Any], width: int, half: torch.dtype) -> NDArray[np.float32]:
    """Unpack the numbers in some records to float32.

    >>> rows = np.array([[1.0, -0.5, 3.0]], np.float32)
    >>> packed(rows, torch.bfloat16).shape, expanded(packed(rows, torch.bfloat16), 3, torch.bfloat16).tolist()
    ((1, 2), [[1.0, -0.5, 3.0]])
    """
    bits = torch.from_numpy(np.ascontiguousarray(records).view(np.int16))
    return bits.view(half)[:, :width].to(torch.float32).numpy()


def packed(rows: NDArray[Any], half: torch.dtype) -> NDArray[np.float32]:
    """Pack numbers into records, rounding each to nearest."""
    out = torch.zeros((len(rows), 2 * words(rows.shape[1])), dtype=half, device="cpu")
    out[:, : rows.shape[1]] = torch.from_numpy(np.ascontiguousarray(rows)).to(half)
    return out.view(torch.int16).numpy().view(np.float32)
