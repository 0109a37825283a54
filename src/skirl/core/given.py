"""Initial values of a table's rows from an array, which may be mapped from a file."""

import hashlib
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_PIECE = 16 << 20


class Given:
    """The initial values of all rows of a table, from an array, copied unless it is mapped read-only from a file."""

    def __init__(
        self, shape: tuple[int, ...], kind: str, raw: NDArray[np.uint8] | None, mapped: np.memmap | None = None,
        digest: str | None = None,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.kind = kind
        """The dtype of the values, by its torch name."""
        self._raw = raw
        """uint8 [rows, bytes of a row]; None if only their digest is known."""
        self._digest = digest
        self._file = None if mapped is None else (Path(str(mapped.filename)), mapped.offset)
        self._stamp = None if self._file is None else _stamp(self._file[0])
        self.where = "the checkpoint" if raw is None else "the array" if self._file is None else str(self._file[0])

    @classmethod
    def of(cls, source: Any, table: str, rows: int, dim: int) -> Self:
        try:
            if isinstance(source, cls):  # of another table
                given = source
            elif isinstance(source, np.ndarray) or hasattr(source, "detach"):
                values, kind = _array(source)
                raw = _rows(values, kind)
                given = cls(values.shape, kind, raw, values if isinstance(values, np.memmap) else None)
            else:
                raise TypeError(
                    f"is a {type(source).__name__}, set it to a skirl Uniform, Normal or Constant, or to an array or a "
                    'tensor; a file is mapped by numpy.load("FILE.npy", mmap_mode="r")'
                )
            if given.shape != (rows, dim):
                raise ValueError(
                    f"has shape {list(given.shape)} in {given.where}, but the table is [{rows}, {dim}]: give both the same "
                    "shape"
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"table {table!r}: init {error}") from None
        return given

    @classmethod
    def absent(cls, rows: int, dim: int, digest: str) -> Self:
        """Return a stand-in for values that a checkpoint names by digest but does not hold: it has only used rows."""
        return cls((rows, dim), "float32", None, digest=digest)

    def __repr__(self) -> str:
        return f"Given({self.where}, {list(self.shape)}, {self.kind})"

    def __getstate__(self) -> dict[str, Any]:  # a file is mapped again, as it may be larger than memory
        return self.__dict__ | ({} if self._file is None else {"_raw": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            width = self.shape[1] * _BYTES[self.kind]
            self._raw = np.memmap(self._file[0], np.uint8, "r", self._file[1], (self.shape[0], width)).view(np.ndarray)

    @property
    def digest(self) -> str:
        """The first 32 hex digits of the SHA-256 of the values, alike in memory and in a file. The first access reads
        them all."""
        if self._digest is None:
            raw = self._there()
            found = hashlib.sha256(f"{self.kind} {self.shape[0]} {self.shape[1]}\n".encode())
            step = max(1, _PIECE // raw.shape[1])
            for start in range(0, self.shape[0], step):
                found.update(np.ascontiguousarray(raw[start : start + step]).data)
            self._digest = found.hexdigest()[:32]
        return self._digest

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        raw = self._there()
        out = raw.take(rows, axis=0)  # without the GIL: a page may have to come from disk
        if self.kind == "bfloat16":
            return (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        values = out.view(self.kind)
        return values.astype(np.float32) if self.kind == "float16" else values

    def check_dtype(self, table: str, dtype: str) -> None:
        """Raise if rows of this dtype would round the values; only half precision takes float32, rounded to nearest."""
        halves = {"float16", "bfloat16"}
        fit = {"float64": {"float64", "float32", *halves}, "float32": {"float32", *halves}}.get(
            dtype, {dtype, "float32"}
        )
        if self.kind not in fit:
            raise TypeError(
                f"table {table!r}: init is {self.kind} in {self.where} and rows are {dtype}: convert it to {dtype}, or set "
                f"dtype=torch.{self.kind}"
            )

    def _there(self) -> NDArray[np.uint8]:
        """Return the values. Raise if they are not here, or if their file has changed."""
        if self._raw is None:
            raise ValueError(
                f"the first values of rows that were never used are not in {self.where}, which has only used rows: pass the "
                "array as init of the table, or leave such rows out"
            )
        if self._file is not None and _stamp(self._file[0]) != self._stamp:
            raise ValueError(
                f"{self._file[0]} has changed since rows were initialized from it: restore the file, and resume from a "
                "checkpoint"
            )
        return self._raw


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _array(source: Any) -> tuple[NDArray[Any], str]:
    """Return the values, copied unless they are mapped read-only from a file, and their dtype by its torch name."""
    kind = None
    if hasattr(source, "detach"):
        source, kind = source.detach().cpu(), str(source.dtype).removeprefix("torch.")
        if kind == "bfloat16":  # NumPy does not have it
            import torch

            source = source.view(torch.int16)
        source = source.numpy()
    mapped = isinstance(source, np.memmap) and source.mode == "r" and source.filename and source.flags.c_contiguous
    return source if mapped else np.array(source, order="C"), kind or source.dtype.name


def _rows(values: np.ndarray, kind: str) -> NDArray[np.uint8]:
    if kind not in _BYTES or not values.dtype.isnative:
        raise TypeError(f"is an array of {values.dtype if kind in _BYTES else kind}: convert it to float32")
    if values.ndim != 2 or not values.size:
        raise ValueError(f"is an array of shape {list(values.shape)}: give [rows, dim]")
    return values.view(np.ndarray).view(np.uint8).reshape(len(values), -1)
