"""Safetensors files that are written in pieces."""

import json
import math
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from skirl.tools.sealed_json import sync_folder, to_disk

_NAMES = {"float32": "F32", "float64": "F64", "int64": "I64"}

Columns = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def bytes_of(columns: Columns) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())


class TensorWriter:
    """An open file, whose tensors are written in pieces, each from its first row on."""

    def __init__(self, file: Any, columns: Columns, about: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(about)}
        begin: dict[str, int] = {}
        place = 0
        for name, (dtype, shape) in sorted(columns.items(), key=lambda item: -item[1][0].itemsize):  # keeps all aligned
            end = place + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _NAMES[dtype.name], "shape": list(shape), "data_offsets": [place, end]}
            begin[name], place = place, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file, self._left = file, place
        self._at = {name: 8 + len(text) + at for name, at in begin.items()}
        file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, rows: np.ndarray) -> None:
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        self._file.seek(self._at[name])
        self._file.write(data)
        self._at[name] += len(data)
        self._left -= len(data)

    def check(self) -> None:
        assert not self._left, "not every row was written"


@contextmanager
def tensors_written(path: Path, columns: Columns, about: Mapping[str, str]) -> Iterator[TensorWriter]:
    """Write a file in a block. It appears once the block has ended without an error."""
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.tmp")
    try:
        with draft.open("xb") as file:
            writer = TensorWriter(file, columns, about)
            yield writer
            writer.check()
            to_disk(file)
        os.replace(draft, path)
        sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)
