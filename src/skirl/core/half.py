"""Rows of half precision as the rest of skirl sees them: words of 32 bits, two numbers each.

Stores, staging and checkpoints move records and never look into them, so a record of halves travels as float32 words that
are only bits; an odd one has a number to spare. A dtype of their own in every store would be a kind of record more for each
of their kernels, and numpy has no bfloat16. Who wants numbers gets them as float32; what comes in is rounded to nearest.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

HALVES = (torch.float16, torch.bfloat16)


def words(width: int) -> int:
    """Words of a record of so many numbers.

    >>> words(64), words(65)
    (32, 33)
    """
    return (width + 1) // 2


def expanded(records: NDArray[Any], width: int, half: torch.dtype) -> NDArray[np.float32]:
    """The numbers of records.

    >>> rows = np.array([[1.0, -0.5, 3.0]], np.float32)
    >>> packed(rows, torch.bfloat16).shape, expanded(packed(rows, torch.bfloat16), 3, torch.bfloat16).tolist()
    ((1, 2), [[1.0, -0.5, 3.0]])
    """
    bits = torch.from_numpy(np.ascontiguousarray(records).view(np.int16))
    return bits.view(half)[:, :width].to(torch.float32).numpy()


def packed(rows: NDArray[Any], half: torch.dtype) -> NDArray[np.float32]:
    """Records of these numbers, each rounded to the nearest."""
    out = torch.zeros((len(rows), 2 * words(rows.shape[1])), dtype=half, device="cpu")
    out[:, : rows.shape[1]] = torch.from_numpy(np.ascontiguousarray(rows)).to(half)
    return out.view(torch.int16).numpy().view(np.float32)
