"""Rows packed as bytes for spills: each row has its values and lists one after the other."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.core.stretches import gather_from
from skirl.data.files.columns import is_text, texts_of
from skirl.tools.jit import kernel

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


class Packing:
    """Packs rows into bytes and back.

    A packed row has a fixed part with the values of all columns in order, where a list or a text has its number of ids or
    bytes. The contents of each list and text follow. There are no nulls: rows without a session or time have been refused
    before, and missing ids are values.

    **Arguments**

    - `schema`: schema of the rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._inside = [_width_inside(field.type) for field in schema]
        """For each column: bytes of an id of a list, 1 for text, or 0 if each row has one value."""
        widths = [4 if inside else _width(field.type) for field, inside in zip(schema, self._inside)]
        self._fixed = np.dtype([(f"c{k}", _WORDS.get(w, f"V{w}")) for k, w in enumerate(widths)])

    @cached_property
    def least(self) -> int:
        """Bytes of a row whose lists and texts are empty."""
        return self._fixed.itemsize

    def sizes_of(self, rows: Any) -> np.ndarray:
        """Return the packed bytes of each row (int64 [n]).

        **Arguments**

        - `rows`: a record batch.
        """
        out = np.full(len(rows), self.least, np.int64)
        for column, inside in zip(rows.columns, self._inside):
            if inside:
                out += np.diff(_within(column)[0]).astype(np.int64) * inside
        return out

    def packed(self, rows: Any, order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Pack rows in this order (uint8).

        **Arguments**

        - `rows`: a record batch.
        - `order`: int64: indices of the rows to pack.
        - `sizes`: int64: packed bytes of each of those.
        """
        fixed = np.empty(len(order), self._fixed)
        out, at = np.empty(int(sizes.sum()), np.uint8), np.cumsum(sizes) - sizes
        behind = at + self.least
        for k, (column, inside) in enumerate(zip(rows.columns, self._inside)):
            if column.null_count:
                raise AssertionError(
                    f"column {rows.schema.names[k]!r} has nulls: rows are not what they are said to be"
                )
            if not inside:
                fixed[f"c{k}"] = _values(column)[order]
                continue
            offsets, values = _within(column)
            begins, ends = offsets[:-1][order].astype(np.int64), offsets[1:][order]
            fixed[f"c{k}"] = ends - begins
            own = (ends - begins) * inside
            _scatter_to(values, begins * inside, own, out, behind)
            behind += own
        values = fixed.view(np.uint8)
        values.flags.writeable = False  # like those of lists, so that one kernel is compiled for both
        _scatter_to(values, np.arange(len(order)) * self.least, _same(self.least, order), out, at)
        return out

    def columns(self, packed: np.ndarray, places: np.ndarray) -> Any:
        """Unpack rows into a record batch.

        **Arguments**

        - `packed`: uint8: packed rows.
        - `places`: int64 [n]: offset of each row in them.
        """
        fixed = np.empty(len(places), self._fixed)
        gather_from(packed, places, _same(self.least, places), fixed.view(np.uint8))
        behind = places + self.least
        arrays = []
        for k, (field, inside) in enumerate(zip(self.schema, self._inside)):
            values = np.ascontiguousarray(fixed[f"c{k}"])
            if not inside:
                arrays.append(_column(field.type, values))
                continue
            sizes = values.view(np.int32).astype(np.int64)
            offsets = np.zeros(len(places) + 1, np.int64)
            np.cumsum(sizes, out=offsets[1:])
            if offsets[-1] > np.iinfo(np.int32).max:
                raise OverflowError(f"more than 2**31 values in column {field.name!r} of one row group")
            own = np.empty(int(offsets[-1]) * inside, np.uint8)
            gather_from(packed, behind, sizes * inside, own)
            arrays.append(_lists(field.type, offsets.astype(np.int32), own))
            behind += sizes * inside
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


@kernel
def _scatter_to(values, starts, sizes, out, places):
    """Copy ranges of values to other places in `out`."""
    for k in range(len(starts)):
        part, own = values[starts[k] : starts[k] + sizes[k]], out[places[k] : places[k] + sizes[k]]
        for j in range(len(part)):
            own[j] = part[j]


def _same(size: int, rows: np.ndarray) -> np.ndarray:
    return np.full(len(rows), size, np.int64)


def _width(kind: pa.DataType) -> int:
    return max(1, kind.bit_width // 8)


def _width_inside(kind: pa.DataType) -> int:
    if is_text(kind):
        return 1
    return _width(kind.value_type) if pa.types.is_list(kind) else 0


def _within(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of the lists or texts of a column, and their contents as bytes (uint8)."""
    if pa.types.is_list(column.type):
        return column.offsets.to_numpy(), _values(column.values).view(np.uint8)
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        column = column.cast(pa.binary())
    return texts_of(column)


def _values(column: Any) -> np.ndarray:
    """Return the values of a column as words of their width, without copying unless they are booleans."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    width, raw = _width(column.type), column.buffers()[1]
    kind = np.dtype(_WORDS.get(width, f"V{width}"))
    if raw is None or not len(column):
        return np.empty(0, kind)
    return np.frombuffer(raw, kind, len(column), column.offset * width)


def _column(kind: pa.DataType, values: np.ndarray) -> Any:
    if pa.types.is_boolean(kind):
        return pa.array(values.view(np.uint8)).cast(kind)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _lists(kind: pa.DataType, offsets: np.ndarray, values: np.ndarray) -> Any:
    if pa.types.is_list(kind):
        inside = kind.value_type
        own = pa.Array.from_buffers(inside, len(values) // _width(inside), [None, pa.py_buffer(values)])
        return pa.ListArray.from_arrays(pa.array(offsets), own, type=kind)
    plain = kind if pa.types.is_string(kind) or pa.types.is_binary(kind) else pa.binary()
    own = pa.Array.from_buffers(plain, len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(values)])
    return own if kind == plain else own.cast(kind)


def columns_without(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Return a schema without some of its columns.

    **Arguments**

    - `schema`: the schema.
    - `names`: names of the columns to remove.
    """
    return pa.schema([field for field in schema if field.name not in names], schema.metadata)
