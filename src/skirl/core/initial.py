"""Initial values: what a row holds before its first update, from (seed, key) alone. docs/design.md has the formula."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remember
from math import isfinite
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skirl.core.given import Given
from skirl.core.keys import ROW_BITS, table_of
from skirl.tools.jit import kernel

UNIFORM, NORMAL, CONSTANT = 0, 1, 2
QUANTILES = 1 << 16

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S8, _S16, _S27, _S30, _S31, _S40 = (np.uint64(s) for s in (8, 16, 27, 30, 31, 40))
_LOW24 = np.uint64(0xFFFFFF)
_LOW16 = np.uint64(0xFFFF)


@dataclass(frozen=True)
class Uniform:
    """Uniform over [-bound, bound), in 2**24 different values.

    **Arguments**

    - `bound`: the largest absolute value, 0 or more.
    """

    bound: float

    def __post_init__(self) -> None:
        if not (isfinite(self.bound) and self.bound >= 0):
            raise ValueError(f"Uniform: bound is {self.bound}, set it to a finite number, 0 or more")


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0: one of 65,536 equally likely values, the farthest 4.3 standard deviations from 0.

    **Arguments**

    - `std`: the standard deviation; 1 as in nn.EmbeddingBag.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        if not (isfinite(self.std) and self.std >= 0):
            raise ValueError(f"Normal: std is {self.std}, set it to a finite number, 0 or more")


@dataclass(frozen=True)
class Constant:
    """The same value everywhere.

    **Arguments**

    - `value`: the value of every number in a new row; 0 suits weights that should have no effect at first.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ValueError(f"Constant: value is {self.value}, set it to a finite number")


Initial = Uniform | Normal | Constant | Given


@dataclass(frozen=True)
class InitialTable:
    """The initialisers of all tables as arrays, for `fill`; entry t is that of table t."""

    kind: NDArray[np.int32]
    scale: NDArray[Any]
    """In the dtype of the rows, so that the kernel's single multiplication rounds once."""
    quantiles: NDArray[np.float32]
    """A single zero, never read, if no table is Normal."""

    @classmethod
    def of(cls, initials: Sequence[Initial], dtype: DTypeLike = np.float32) -> "InitialTable":
        kinds, scales = zip(*map(_kind_and_scale, initials))
        quantiles = normal_quantiles() if NORMAL in kinds else np.zeros(1, np.float32)
        quantiles.flags.writeable = False  # one compiled kernel for both
        return cls(np.array(kinds, np.int32), np.array(scales, dtype), quantiles)


def _kind_and_scale(initial: Initial) -> tuple[int, float]:
    match initial:
        case Uniform(bound):
            return UNIFORM, bound / 2**23
        case Normal(std):
            return NORMAL, std
        case Constant(value):
            return CONSTANT, value
        case Given():  # their rows are fetched, never made by a kernel
            return CONSTANT, 0.0


@remember
def normal_quantiles() -> NDArray[np.float32]:
    inverse = NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / QUANTILES) for i in range(QUANTILES)], np.float32)
    values.flags.writeable = False  # shared by all callers
    return values


def first_rows(keys: Any, initial: Initial, dim: int, seed: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """For tests and examples: the initial weights of some keys, all with one initialiser."""
    keys = np.asarray(keys, np.int64)
    table = InitialTable.of([initial], dtype)
    tables = int(table_of(keys.max(initial=0))) + 1
    kind, scale = np.repeat(table.kind, tables), np.repeat(table.scale, tables)
    out = np.empty((keys.size, dim), dtype)
    slots = np.arange(keys.size, dtype=np.int32)
    fill(keys, slots, out, dim, seed, kind, scale, table.quantiles, 0.0, 0, keys.size)
    return out


@kernel
def mix(z: np.uint64) -> np.uint64:
    """Apply the finaliser of splitmix64: every bit of the input affects every bit of the output."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@kernel
def fill(keys, slots, cache, dim, seed, kind, scale, quantiles, state_value, lo, hi):
    """Write the initial records of keys[lo:hi] to cache[slots[lo:hi]]; `state_value` fills the columns from dim on."""
    number = cache.dtype.type  # float32 times int or float64 would stay float64 until stored
    state = number(state_value)
    width = cache.shape[1]
    mixed_seed = mix(np.uint64(seed))
    for i in range(lo, hi):
        slot = slots[i]
        table = keys[i] >> ROW_BITS
        times = scale[table]
        base = mix(np.uint64(keys[i]) ^ mixed_seed)
        if kind[table] == UNIFORM:
            for j in range(dim >> 1):
                z = mix(base + np.uint64(j + 1) * _GOLDEN)
                cache[slot, 2 * j] = number(np.int32(z >> _S40) - np.int32(1 << 23)) * times
                cache[slot, 2 * j + 1] = number(np.int32((z >> _S8) & _LOW24) - np.int32(1 << 23)) * times
            if dim & 1:
                z = mix(base + np.uint64((dim >> 1) + 1) * _GOLDEN)
                cache[slot, dim - 1] = number(np.int32(z >> _S40) - np.int32(1 << 23)) * times
        elif kind[table] == NORMAL:
            for j in range(dim >> 1):
                z = mix(base + np.uint64(j + 1) * _GOLDEN)
                cache[slot, 2 * j] = number(quantiles[z >> _S40 >> _S8]) * times
                cache[slot, 2 * j + 1] = number(quantiles[(z >> _S16) & _LOW16]) * times
            if dim & 1:
                z = mix(base + np.uint64((dim >> 1) + 1) * _GOLDEN)
                cache[slot, dim - 1] = number(quantiles[z >> _S40 >> _S8]) * times
        else:
            for d in range(dim):
                cache[slot, d] = times
        for d in range(dim, width):
            cache[slot, d] = state
