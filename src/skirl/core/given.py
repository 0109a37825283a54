"""Initial values of a table's rows from an array or from a memory-mapped file."""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from skirl.tools.jit import kernel

_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_SAFETENSORS = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 16 << 20
"""Bytes hashed at a time for the digest."""


class Given:
    """The initial values of all rows of a table; `Table(init=...)` makes it from an array, a tensor or a file.

    >>> given = Given.of(np.array([[1, 2], [3, 4]], np.float32), "item", rows=2, dim=2)
    >>> given.take(np.array([1, 0])).tolist()
    [[3.0, 4.0], [1.0, 2.0]]
    """

    def __init__(
        self, shape: tuple[int, int], kind: str, raw: NDArray[np.uint8] | None, *, where: str, path: Path | None = None,
        source: tuple[Path, str] | None = None, digest: str | None = None,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.kind = kind
        """The dtype of the values, by its torch name."""
        self.where = where
        """The source's name in errors."""
        self._raw = raw
        """uint8 [rows, bytes of a row]; None if only their digest is known."""
        self._path = path
        """The file that the values are mapped from, if any."""
        self._source = source
        """That file and the name of the table, if the user gave the file's path."""
        self._digest = digest
        self._stamp = None if path is None else _stamp(path)

    @classmethod
    def of(cls, source: Any, table: str, rows: int, dim: int) -> Self:
        """Build from what a user gives. An array in memory is copied, since its owner may change it."""
        by_name = isinstance(source, str | os.PathLike)
        try:
            if by_name:
                shape, kind, raw, path = _mapped(Path(source), table)
                where = str(source)
            elif isinstance(source, np.ndarray) or hasattr(source, "detach"):
                shape, kind, raw, path = _copied(source)
                where = "the array"
            else:
                raise TypeError(
                    f"is a {type(source).__name__}, set it to a skirl Uniform, Normal or Constant, to an array or a tensor, "
                    "or to a .npy or .safetensors file"
                )
            if shape != (rows, dim):
                raise ValueError(
                    f"has shape {list(shape)} in {where}, but the table is [{rows}, {dim}]: give both the same shape"
                )
        except (TypeError, ValueError, OSError) as error:
            kind_of = TypeError if isinstance(error, TypeError) else ValueError
            raise kind_of(f"table {table!r}: init {error}") from None
        named = (path, table) if by_name and path is not None else None
        return cls((rows, dim), kind, raw, where=where, path=path, source=named)

    @classmethod
    def absent(cls, rows: int, dim: int, digest: str) -> Self:
        """Return a stand-in for values that a checkpoint names by digest but does not hold: it has only used rows."""
        return cls((rows, dim), "float32", None, where="the checkpoint", digest=digest)

    def __repr__(self) -> str:
        return f"Given({self.where}, {list(self.shape)}, {self.kind})"

    def __getstate__(self) -> dict[str, Any]:  # a file is mapped again, as it may be larger than memory
        return self.__dict__ | ({} if self._source is None else {"_raw": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._source is not None:
            self._raw = _mapped(*self._source)[2]

    @property
    def digest(self) -> str:
        """The first 32 hex digits of the SHA-256 of the values; equal for equal arrays, whether in memory or in a file.

        The first access reads all values: about 3 s for 1 GiB on one core, and more from a slow disk.
        """
        if self._digest is None:
            self._check()
            assert self._raw is not None
            found = hashlib.sha256(f"{self.kind} {self.shape[0]} {self.shape[1]}\n".encode())
            step = max(1, _PIECE // self._raw.shape[1])
            for start in range(0, self.shape[0], step):
                found.update(np.ascontiguousarray(self._raw[start : start + step]).data)
            self._digest = found.hexdigest()[:32]
        return self._digest

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values of some rows, [n, dim]; half precision is converted to float32."""
        self._check()
        assert self._raw is not None
        out = np.empty((len(rows), self._raw.shape[1]), np.uint8)
        gather(self._raw, rows, out)  # without the GIL: a page may have to come from disk
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

    def _check(self) -> None:
        """Raise if the values are not here, or if their file has changed."""
        if self._raw is None:
            raise ValueError(
                f"the first values of rows that were never used are not in {self.where}, which has only used rows: pass the "
                "array as init of the table, or leave such rows out"
            )
        if self._path is not None and _stamp(self._path) != self._stamp:
            raise ValueError(
                f"{self._path} has changed since rows were initialized from it: restore the file, and resume from a "
                "checkpoint"
            )


@kernel
def gather(raw, rows, out):
    """Set out[i] = raw[rows[i]]; both are uint8."""
    for i in range(rows.size):
        row = rows[i]
        for j in range(raw.shape[1]):  # assigning to a slice takes seconds to compile
            out[i, j] = raw[row, j]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the file's size and modification time, which change when the file does; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


_Found = tuple[tuple[int, ...], str, NDArray[np.uint8], Path | None]


def _copied(source: Any) -> _Found:
    """Copy an array or a tensor, unless it is mapped read-only from a file."""
    kind = None
    if hasattr(source, "detach"):
        source, kind = source.detach().cpu(), str(source.dtype).removeprefix("torch.")
        if kind == "bfloat16":  # NumPy does not have it
            import torch

            source = source.view(torch.int16)
        source = source.numpy()
    kind = kind or source.dtype.name
    if isinstance(source, np.memmap) and source.mode == "r" and source.filename and source.flags.c_contiguous:
        return (*_rows(source, kind), Path(source.filename).resolve())
    return (*_rows(np.array(source, order="C"), kind), None)


def _mapped(path: Path, table: str) -> _Found:
    """Map a file's values."""
    if not path.is_file():
        raise ValueError(f"names {path}, and there is no such file: set it to a .npy or .safetensors file")
    path = path.resolve()
    if path.suffix == ".npy":
        try:
            values = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a damaged header can make NumPy raise anything
            why = " ".join(str(error).split())[:100] or type(error).__name__
            raise ValueError(
                f"names {path}, which is not a complete .npy file ({why}): write it with numpy.save"
            ) from None
        if not values.flags.c_contiguous:
            raise ValueError(f"names {path}, which is in Fortran order: save numpy.ascontiguousarray of it")
        return (*_rows(values, values.dtype.name, f" in {path}"), path)
    if path.suffix == ".safetensors":
        kind, shape, begin = _tensor(path, table)
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"is {list(shape)} in {path}: give [rows, dim]")
        values = np.memmap(path, np.uint8, "r", begin, (shape[0], shape[1] * _BYTES[kind]))
        return shape, kind, values.view(np.ndarray), path
    raise ValueError(f"names {path}: set it to a .npy or .safetensors file")


def _rows(values: np.ndarray, kind: str, where: str = "") -> tuple[tuple[int, ...], str, NDArray[np.uint8]]:
    """Return the shape, the dtype and the bytes of each row. Raise if the array is unsuitable."""
    if kind not in _BYTES or not values.dtype.isnative:
        raise TypeError(f"is an array of {values.dtype if kind in _BYTES else kind}{where}: convert it to float32")
    if values.ndim != 2 or not values.size:
        raise ValueError(f"is an array of shape {list(values.shape)}{where}: give [rows, dim]")
    raw = values.view(np.ndarray).view(np.uint8).reshape(len(values), -1)
    raw.flags.writeable = False  # so that arrays and files share one compiled kernel
    return values.shape, kind, raw


def _tensor(path: Path, table: str) -> tuple[str, tuple[int, ...], int]:
    """Return the dtype and shape of the table's tensor in a safetensors file, and its offset in bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:  # checks that the file is complete and consistent
            names = sorted(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"names {path}, which is not a complete safetensors file ({error}): write it again, or name another"
        ) from None
    fits = [name for name in names if name in (f"{table}.weight", table, "weight") or name.endswith(f".{table}.weight")]
    fits = fits or names
    if len(fits) != 1:
        raise ValueError(
            f"names {path}, which has {', '.join(fits[:9]) or 'no tensor'}: call the tensor {table + '.weight'!r}, or give "
            "it as an array"
        )
    if fits[0].removesuffix("weight") + "ids" in names:
        raise ValueError(f"names {path}, which has rows by their ids: take them with skirl.import_rows")
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))[fits[0]]
    if entry["dtype"] not in _SAFETENSORS:
        raise TypeError(f"is {entry['dtype']} in {path}: convert it to float32")
    return _SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
