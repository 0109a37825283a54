"""Stochastic rounding in plain numpy, to compare with the kernels' bit tricks."""

import numpy as np
import torch

from skirl.core.reference import _mix

FORMATS = {torch.bfloat16: (8, -126, 3.3895313892515355e38), torch.float16: (11, -14, 65504.0)}
"""Bits of the significand, the exponent of the smallest normal, and the largest number."""


def random_bits(seed: int, step: int, key: int, part: int, n: int) -> np.ndarray:
    """Return 24 random bits for each of n elements in a part of a record."""
    golden = 0x9E3779B97F4A7C15
    base = _mix(int(key) ^ _mix((_mix(seed) + (step + 1) * golden) % 2**64))
    pairs = [_mix((base + (part * 2**32 + j + 1) * golden) % 2**64) for j in range((n + 1) // 2)]
    return np.array([bits for z in pairs for bits in (z >> 40, z >> 8 & 0xFFFFFF)][:n], np.int64)


def rounded(x: np.ndarray, bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float32 numbers to float32 numbers that dtype can hold."""
    precision, least, largest = FORMATS[dtype]
    size = np.abs(x.astype(np.float64))
    finite = np.isfinite(size)
    size = np.where(finite, size, 0.0)
    exponent = np.maximum(np.frexp(size)[1] - 1, least)
    gap = 2.0 ** (exponent - precision + 1)
    low = np.floor(size / gap)
    # As many random bits as float32 has below the last bit kept: 16 or 13, and 24 below float16's normals.
    used = 24 if dtype == torch.float16 else 16
    kept = np.where((dtype == torch.float16) & (size >= 2.0**least), 13, used)
    fraction = np.floor((size / gap - low) * 2.0**kept)
    up = fraction + (bits >> (24 - kept)) >= 2.0**kept
    out = (low + up) * gap
    out = np.where(out > largest, np.inf, out)
    return np.where(finite, np.copysign(out, x), x).astype(np.float32)
