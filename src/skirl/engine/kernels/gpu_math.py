"""Building blocks of the Triton kernels in gpu.py: sizes, the launch, arithmetic that rounds once.

A program works on a block [ROWS, D]. D is the dim rounded up to a power of two and masked, so one kernel serves all dims.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import knobs

from skirl.core import keys

INTERPRETED = bool(knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter (TRITON_INTERPRET=1 before triton is imported), on CPU tensors."""

ROW_BITS = tl.constexpr(keys.ROW_BITS)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


def block(dim: int, elements: int = 1024) -> dict[str, int]:
    """Return the lanes, rows and warps of a program for rows of `dim` numbers."""
    lanes = max(2, power_of_two(dim))  # at least two: random numbers are made in pairs
    warps = 4 if lanes <= 1024 else 8
    return {"D": lanes, "ROWS": max(1, min(elements // lanes, 128)), "num_warps": warps}


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


_one_at_a_time = threading.Lock()


@contextmanager
def _interpreted() -> Iterator[None]:
    """Run one kernel at a time, without warnings: Triton's language is patched for all threads while a kernel runs, and
    numpy warns of infinities and NaN.
    """
    with _one_at_a_time, np.errstate(all="ignore"):
        yield


def launch(kernel: Any, n: int, *args: Any, tiles: int = 1, **options: Any) -> None:
    """Run a kernel on the current stream, without fusing multiply and add. Do nothing if there are no rows."""
    if n == 0:
        return
    with _interpreted() if INTERPRETED else nullcontext():
        kernel[(-(-n // options["ROWS"]), tiles)](*args, enable_fp_fusion=False, **options)


def mix(z: int) -> int:
    """Apply the finaliser of splitmix64, in Python integers on the host."""
    z = (z ^ (z >> 30)) * _MIX1.value % 2**64
    z = (z ^ (z >> 27)) * _MIX2.value % 2**64
    return z ^ (z >> 31)


def signed(z: int) -> int:
    """Return an unsigned 64-bit number as the int64 that kernels declare."""
    return z - 2**64 if z >= 2**63 else z


@triton.jit
def scramble(z):
    z = (z ^ (z >> 30)) * _MIX1
    z = (z ^ (z >> 27)) * _MIX2
    return z ^ (z >> 31)


@triton.jit
def uniform(base, part: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Return 24 random bits for each element of a part of a record, [ROWS, D] int32. `base` is uint64 [ROWS].

    Part 0 draws as initial.fill does. One scramble gives two elements, which are adjacent in a thread.
    """
    count = tl.arange(0, D // 2).to(tl.uint64) + (part * 4294967296 + 1)
    z = scramble(base[:, None] + count[None, :] * GOLDEN)
    even = (z >> 40).to(tl.int32)
    odd = ((z >> 8) & 0xFFFFFF).to(tl.int32)
    return tl.reshape(tl.join(even, odd), [ROWS, D])


@triton.jit
def divide(a, b):
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def root(x):
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def above(a, b, then, other):
    return tl.where(a > b, then, other)


@triton.jit
def zero(like):
    return tl.zeros_like(like)


@triton.jit
def fold(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Return the sum of each row by halves, as cpu.tree_sum does: [ROWS, D] -> [ROWS, 1].

    A tl.sum over the whole row would add in an order that depends on how Triton lays a block out over threads. A sum of
    two numbers has no order: it is an exchange between two lanes, or an add in one. (With tl.split instead, each level
    went through shared memory, with a barrier.) Lanes past the end of a row hold +0.0. They, and the interpreter, turn
    a sum of nothing but -0.0 into +0.0. That does no harm: squares are added, or the sum starts from zero.
    """
    if D == 1:
        return x
    else:
        return fold(tl.sum(tl.reshape(x, [ROWS, 2, D // 2]), axis=1), ROWS, D // 2)


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Round a float32 to the nearest number of `dtype`. By hand for bfloat16, since the interpreter would truncate."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        cut = (bits >> 16) | 0x40  # a NaN stays one
        return tl.where(x != x, cut, up).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def rows_at(cache, slot, stride: tl.constexpr, column, mask, dtype: tl.constexpr):
    """Load rows of the cache in the dtype of computation, zeros where masked. slot * stride is computed in 64 bits."""
    return tl.load(cache + slot.to(tl.int64)[:, None] * stride + column, mask=mask, other=0).to(dtype)
