"""Initial values: what a row holds before its first update, from (seed, key) alone, or from an array."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remember
from math import isfinite
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

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


_PIECE = 16 << 20


class Given:
    """The initial values of all rows of a table, from an array, copied unless it is mapped read-only from a file. Half
    precision becomes float32."""

    def __init__(self, values: NDArray[Any] | None, shape: tuple[int, ...], digest: str | None = None) -> None:
        self.shape = shape
        self.kind = "float32" if values is None else values.dtype.name
        self._values = None if values is None else values.view(np.ndarray)
        """None if only their digest is known."""
        self._digest = digest
        self._file = Path(str(values.filename)) if isinstance(values, np.memmap) else None
        self._stamp = None if self._file is None else _stamp(self._file)
        self.where = str(self._file or ("the checkpoint" if values is None else "the array"))

    @classmethod
    def of(cls, source: Any, table: str, rows: int, dim: int) -> Self:
        try:
            if isinstance(source, cls):  # of another table
                given = source
            elif isinstance(source, np.ndarray) or hasattr(source, "detach"):
                values = _values_of(source)
                given = cls(values, values.shape)
            else:
                raise TypeError(
                    f"is a {type(source).__name__}, set it to a skirl Uniform, Normal or Constant, or to an array or a "
                    'tensor; a file is mapped by numpy.load("FILE.npy", mmap_mode="r")'
                )
            if given.shape != (rows, dim):
                raise ValueError(
                    f"has shape {list(given.shape)} in {given.where}, but the table is [{rows}, {dim}]: make them alike"
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"table {table!r}: init {error}") from None
        return given

    @classmethod
    def absent(cls, rows: int, dim: int, digest: str) -> Self:
        """Return a stand-in for values that a checkpoint names by digest but does not hold: it has only used rows."""
        return cls(None, (rows, dim), digest)

    def __repr__(self) -> str:
        return f"Given({self.where}, {list(self.shape)}, {self.kind})"

    @property
    def digest(self) -> str:
        """The first 32 hex digits of the SHA-256 of the values, wherever they are. The first access reads them all."""
        if self._digest is None:
            values = self._there()
            found = hashlib.sha256(f"{self.kind} {self.shape[0]} {self.shape[1]}\n".encode())
            step = max(1, _PIECE // values[0].nbytes)
            for start in range(0, self.shape[0], step):
                found.update(np.ascontiguousarray(values[start : start + step]).data)
            self._digest = found.hexdigest()[:32]
        return self._digest

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        return self._there().take(rows, axis=0)  # without the GIL: a page may have to come from disk

    def check_dtype(self, table: str, dtype: str) -> None:
        """Raise if float32 rows would round the values; half precision rounds them to nearest."""
        if self.kind == "float64" and dtype != "float64":
            raise TypeError(
                f"table {table!r}: init is {self.kind} in {self.where} and rows are {dtype}: convert it to {dtype}, or set "
                f"dtype=torch.{self.kind}"
            )

    def _there(self) -> NDArray[Any]:
        if self._values is None:
            raise ValueError(
                f"the first values of rows that were never used are not in {self.where}, which has only used rows: pass the "
                "array as init of the table, or leave such rows out"
            )
        if self._file is not None and _stamp(self._file) != self._stamp:
            raise ValueError(
                f"{self._file} has changed since rows were initialized from it: restore the file, and resume from a "
                "checkpoint"
            )
        return self._values


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _values_of(source: Any) -> NDArray[Any]:
    """Return the values, copied unless they are mapped read-only from a file."""
    if hasattr(source, "detach"):
        source = source.detach().cpu()
        source = (source.float() if source.is_floating_point() and source.itemsize == 2 else source).numpy()
    if source.dtype == np.float16:
        source = source.astype(np.float32)
    mapped = isinstance(source, np.memmap) and source.mode == "r" and source.filename and source.flags.c_contiguous
    values = source if mapped else np.array(source, order="C")
    if values.dtype not in (np.float32, np.float64):
        raise TypeError(f"is an array of {values.dtype}: convert it to float32")
    if values.ndim != 2 or not values.size:
        raise ValueError(f"is an array of shape {list(values.shape)}: give [rows, dim]")
    return values


Initial = Uniform | Normal | Constant | Given


def as_arrays(
    initials: Sequence[Initial], dtype: DTypeLike = np.float32
) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.float32]]:
    """Return the initialisers of all tables for `fill`: kinds; scales in the dtype of the rows, so that the kernel's single
    multiplication rounds once; and quantiles, a single zero, never read, if no table is Normal."""
    kinds, scales = zip(*map(_kind_and_scale, initials))
    quantiles = normal_quantiles() if NORMAL in kinds else np.zeros(1, np.float32)
    quantiles.flags.writeable = False  # one compiled kernel for both
    return np.array(kinds, np.int32), np.array(scales, dtype), quantiles


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
    return np.array([inverse((i + 0.5) / QUANTILES) for i in range(QUANTILES)], np.float32)


def first_rows(keys: Any, initial: Initial, dim: int, seed: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """For tests and examples: the initial weights of some keys, all with one initialiser."""
    keys = np.asarray(keys, np.int64)
    made = as_arrays([initial] * (int(table_of(keys.max(initial=0))) + 1), dtype)
    out = np.empty((keys.size, dim), dtype)
    fill(keys, np.arange(keys.size, dtype=np.int32), out, 0, dim, dim, seed, *made, 0.0, 0, keys.size)
    return out


@kernel
def mix(z: np.uint64) -> np.uint64:
    """Apply the finaliser of splitmix64: every bit of the input affects every bit of the output."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


@kernel
def fill(keys, slots, cache, first, dim, width, seed, kind, scale, quantiles, state_value, lo, hi):
    """Write the initial records of keys[lo:hi] to cache[slots[lo:hi]]; `state_value` fills the columns from dim to width.
    `first`: an even number, that of the table's column which comes first here."""
    number = cache.dtype.type  # float32 times int or float64 would stay float64 until stored
    state = number(state_value)
    mixed_seed = mix(np.uint64(seed))
    for i in range(lo, hi):
        slot = slots[i]
        table = keys[i] >> ROW_BITS
        times = scale[table]
        base = mix(np.uint64(keys[i]) ^ mixed_seed) + np.uint64(first >> 1) * _GOLDEN
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
