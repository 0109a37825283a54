"""Safetensors files that are written and read in pieces, with a checksum for each tensor.

An `Entry` describes a file to its reader, which compares the file's header instead of parsing it."""

import hashlib
import json
import math
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from skirl.tools.sealed_json import CheckpointError, sync_folder, to_disk

_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64"}
_SIZES = {"float32": 4, "float64": 8, "int64": 8}

Columns = Mapping[str, tuple[np.dtype, tuple[int, ...]]]
Entry = dict[str, Any]
"""A description of a file, as `TensorWriter.entry` returns it:
{"file": name, "columns": {name: [dtype, shape]}, "about": ..., "bytes": size, "sha256": ...}."""


def bytes_of(columns: Columns) -> int:
    """Return the number of bytes that the tensors take."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())


def _layout(columns: Columns, about: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the head of a file, and where each tensor begins in it."""
    header: dict[str, object] = {"__metadata__": dict(about)}
    begin: dict[str, int] = {}
    place = 0
    for name, (dtype, shape) in sorted(columns.items(), key=lambda item: -item[1][0].itemsize):  # keeps all aligned
        end = place + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [place, end]}
        begin[name], place = place, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + at for name, at in begin.items()}


class TensorWriter:
    """A file whose tensors are written in pieces, each from its first row on; the file appears once all are complete.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TensorWriter(Path(folder, "a"), {"x": (np.dtype(np.int64), (2,))}, {}) as writer:
    ...         writer.write("x", np.array([7]))
    ...         writer.write("x", np.array([8]))
    ...     [[x]] = TensorReader(Path(folder), writer.entry).pieces(["x"], 10)
    >>> x
    array([7, 8])
    """

    def __init__(self, path: Path, columns: Columns, about: Mapping[str, str]) -> None:
        self._path = path
        self._draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")
        self._columns, self._about = dict(columns), dict(about)
        self._head, begin = _layout(columns, about)
        self._at = dict(begin)
        self._end = {name: begin[name] + d.itemsize * math.prod(shape) for name, (d, shape) in columns.items()}
        self._digests = {name: hashlib.sha256() for name in columns}

    def __enter__(self) -> Self:
        self._file = self._draft.open("xb")
        self._file.write(self._head)
        return self

    def write(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows of a tensor."""
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self._digests[name].update(data)
        self._file.seek(self._at[name])
        self._file.write(data)
        self._at[name] += len(data)

    @property
    def entry(self) -> Entry:
        """The description of the file that `TensorReader` needs; valid once all is written."""
        return {
            "file": self._path.name,
            "columns": {name: [dtype.name, list(shape)] for name, (dtype, shape) in self._columns.items()},
            "about": self._about,
            "bytes": len(self._head) + bytes_of(self._columns),
            "sha256": {name: digest.hexdigest() for name, digest in self._digests.items()},
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    assert self._at == self._end, "not every row was written"
                    to_disk(self._file)
            if error is None:
                os.replace(self._draft, self._path)
                sync_folder(self._path.parent)
        finally:
            self._draft.unlink(missing_ok=True)


class TensorReader:
    """A file that `TensorWriter` wrote. If anything is wrong with it, a `CheckpointError` names it."""

    def __init__(self, folder: Path, entry: Entry) -> None:
        try:
            self.path = folder / entry["file"]
            if self.path.parent != folder:
                raise CheckpointError(f"{entry['file']!r} is a file outside its folder: do not trust this checkpoint")
            self._columns = {name: _column(of) for name, of in entry["columns"].items()}
            head, self._begin = _layout(self._columns, entry["about"])
            self._sha256 = {name: str(entry["sha256"][name]) for name in self._columns}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{folder} is not described as it should be ({error!r}): use another checkpoint"
            ) from None
        if not self.path.is_file():
            raise CheckpointError(f"{self.path} is missing: use another checkpoint, or copy the whole folder again")
        size, expected = self.path.stat().st_size, len(head) + bytes_of(self._columns)
        if size != expected:
            raise CheckpointError(f"{self.path} has {size:,} bytes, {expected:,} were written: use another checkpoint")
        with self.path.open("rb") as file:
            if file.read(len(head)) != head:
                raise CheckpointError(f"{self.path} is damaged at its beginning: use another checkpoint")

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def columns(self) -> Columns:
        """The tensors that the file holds: dtype and shape by name."""
        return self._columns

    def check(self) -> None:
        """Read the whole file and compare checksums."""
        for name in self._columns:
            digest = hashlib.sha256()
            for [piece] in self.pieces([name], 1 << 16):
                digest.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
            if digest.hexdigest() != self._sha256[name]:
                raise CheckpointError(f"{self.path} is damaged, the checksum of {name} differs: use another checkpoint")

    def pieces(self, names: list[str], rows: int) -> Iterator[list[np.ndarray]]:
        """Yield some tensors, at most `rows` rows at a time; all of them must have equally many rows."""
        shapes = [self._columns[name][1] for name in names]
        with self.path.open("rb") as file:
            for start in range(0, shapes[0][0], rows):
                n = min(rows, shapes[0][0] - start)
                yield [self._read(file, name, start, n) for name in names]

    def pairs(self, keys: str, rows: str, layout: Any, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield keys and their rows, at most `n` at a time. They must fit a store's layout."""
        if keys not in self or rows not in self:
            raise CheckpointError(f"{self.path} has no {keys}: use another checkpoint")
        if self._columns[keys][1] != self._columns[rows][1][:1]:
            raise CheckpointError(f"{self.path} does not have as many {keys} as {rows}: use another checkpoint")
        for some, records in self.pieces([keys, rows], n):
            try:
                layout.kind(some, records)
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{self.path}: {keys} does not fit its rows ({error})") from None
            yield some, records

    def whole(self, name: str) -> np.ndarray:
        """Return a whole tensor."""
        parts = [piece for [piece] in self.pieces([name], 1 << 20)]
        dtype, shape = self._columns[name]
        return np.concatenate([np.empty((0, *shape[1:]), dtype), *parts])

    def _read(self, file: Any, name: str, start: int, n: int) -> np.ndarray:
        dtype, shape = self._columns[name]
        out = np.empty((n, *shape[1:]), dtype)
        file.seek(self._begin[name] + start * dtype.itemsize * math.prod(shape[1:]))
        data = out.reshape(-1).view(np.uint8).data
        if file.readinto(data) != len(data):
            raise CheckpointError(f"{self.path} ends early: use another checkpoint")
        return out


def _column(of: Any) -> tuple[np.dtype, tuple[int, ...]]:
    name, shape = of
    if name not in _SIZES or not shape or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError(f"a tensor of {name} {shape}")
    return np.dtype(name), tuple(shape)
