"""Writes lists that shift as buffers: each row has a start and a length, the window of the buffer that is its list."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.dedup.layout import LIKELY, RUN, runs_of
from skirl.tools.jit import kernel

MOST_NEW = 8
"""Most ids that a row may add at one end of a buffer; if it has more new ids, it begins another buffer."""


def windows_found(table: Any, schema: FileSchema, new: np.ndarray) -> dict[str, list[str]]:
    """Return the list columns that are smaller as buffers, each by the name of its column of runs.

    **Arguments**

    - `table`: rows in order.
    - `schema`: schema of the file.
    - `new`: bool: where sessions begin.
    """
    found: dict[str, list[str]] = {}
    taken = set(table.column_names)
    free = (name for n in range(1, 1 << 20) if not taken & {*_names(name := f"{RUN}_{n}" if n > 1 else RUN)})
    for spec in schema.ids:
        if spec.list:
            column = one(table.column(spec.name))
            buffers = Buffers(column, new)
            if len(column.flatten()) >= LIKELY * max(1, len(buffers.values)):
                found[next(free)] = [spec.name]
    return found


def with_windows(schema: FileSchema, groups: Mapping[str, Sequence[str]]) -> FileSchema:
    """Return the schema of a file whose lists are windows.

    **Arguments**

    - `schema`: schema of the rows.
    - `groups`: the columns, each by the name of its column of runs.
    """
    of = {name: dict(zip(("run", "start", "length"), _names(run))) for run, names in groups.items() for name in names}
    return replace(schema, ids=tuple(replace(spec, **of.get(spec.name, {})) for spec in schema.ids))


def windows(table: Any, groups: Mapping[str, Sequence[str]], new: np.ndarray) -> Any:
    """Return the rows with each buffer in the first row that has a window of it, null below, and columns of the windows.

    **Arguments**

    - `table`: a row group in order; it begins with a session.
    - `groups`: the columns, each by the name of its column of runs.
    - `new`: bool: where sessions begin.
    """
    for run, names in groups.items():
        for name in names:
            buffers = Buffers(one(table.column(name)), new)
            table = table.set_column(table.column_names.index(name), name, buffers.column())
            of_each = (runs_of(buffers.fresh), buffers.starts, buffers.lengths)
            for column, values in zip(_names(run), of_each, strict=True):
                table = table.append_column(pa.field(column, pa.int32()), pa.array(values.astype(np.int32)))
    return table


class Buffers:
    """The buffers of a list column.

    **Arguments**

    - `lists`: an Arrow list array without nulls.
    - `new`: bool [n]: where sessions begin.

    >>> lists = pa.array([[1, 2, 3], [2, 3, 4], [9, 2, 3], [1, 2]])
    >>> buffers = Buffers(lists, np.array([True, False, False, False]))
    >>> buffers.column().to_pylist(), buffers.starts.tolist(), buffers.lengths.tolist()
    ([[1, 2, 3, 4], None, [9, 2, 3], [1, 2]], [0, 1, 0, 0], [3, 3, 3, 2])
    """

    def __init__(self, lists: Any, new: np.ndarray) -> None:
        offsets = lists.offsets.to_numpy()
        values = lists.values.to_numpy(zero_copy_only=False)
        sizes = np.diff(offsets)
        rows = int(np.diff(np.append(np.flatnonzero(new), len(new))).max(initial=0))
        room = int(sizes.max(initial=0)) + MOST_NEW * rows
        self.fresh = new.copy()
        """bool [n]: rows in which a buffer begins."""
        self.starts = np.zeros(len(new), np.int64)
        """int64 [n]: where in its buffer each row's list begins,"""
        self.lengths = sizes.astype(np.int64)
        """and its length."""
        self.sizes = np.zeros(len(new), np.int64)
        """int64 [n]: number of ids of the buffer that begins in each row, or 0."""
        out = np.empty(int(sizes.sum()), values.dtype)
        work = np.empty(2 * room + 1, values.dtype)
        total = _lay(offsets, values, MOST_NEW, work, self.fresh, self.starts, self.sizes, out)
        self.values = out[:total]
        """The ids of all buffers, one buffer after the other."""

    def column(self) -> Any:
        """Return the buffers as a list column, null in rows where none begins."""
        offsets = np.zeros(len(self.sizes) + 1, np.int32)
        np.cumsum(self.sizes, out=offsets[1:])
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(self.values), mask=pa.array(~self.fresh))


def _names(run: str) -> tuple[str, str, str]:
    return run, f"{run}_start", f"{run}_length"


@kernel
def _lay(offsets, values, most, work, fresh, starts, sizes, out):
    """Find each row's list in the buffer of the rows above, adding ids at one of its ends if needed; else begin a buffer.

    The current buffer is work[low:high]. Returns the number of ids in all buffers.
    """
    middle = len(work) // 2
    low = high = at = middle
    first = total = 0
    for row in range(len(fresh)):
        begin, end = offsets[row], offsets[row + 1]
        count = end - begin
        place, before, behind = -1, 0, 0
        if not fresh[row]:
            for k in range(2 * most + 1):  # 0, 1, -1, 2, -2, ...
                there = at + ((k + 1) // 2 if k % 2 else -(k // 2))
                if place < 0 and _is_at(values, begin, count, work, there, low, high):
                    place = there
            for some in range(1, min(most + 1, count)):
                if place < 0 and _is_at(values, begin, count - some, work, high - count + some, low, high):
                    place, behind = high - count + some, some
                if place < 0 and _is_at(values, begin + some, count - some, work, low, low, high):
                    place, before = low - some, some
        if place < 0:
            total = _put(work, low, high, first, row, starts, sizes, out, total)
            fresh[row] = True
            first = row
            low = high = place = middle
            behind = count
        for k in range(behind):
            work[high + k] = values[end - behind + k]
        for k in range(before):
            work[low - before + k] = values[begin + k]
        low, high, at = low - before, high + behind, place
        starts[row] = place
    return _put(work, low, high, first, len(fresh), starts, sizes, out, total)


@kernel
def _is_at(values, begin, count, work, there, low, high):
    """Return whether `count` ids of a list are in the buffer at `there`."""
    if there < low or there + count > high:
        return False
    k = 0
    while k < count and values[begin + k] == work[there + k]:
        k += 1
    return k == count


@kernel
def _put(work, low, high, first, end, starts, sizes, out, total):
    """Write the buffer of rows first .. end - 1 to `out`, and make their starts relative to it. Return the new total."""
    if first == end:
        return total
    for k in range(high - low):
        out[total + k] = work[low + k]
    sizes[first] = high - low
    for row in range(first, end):
        starts[row] -= low
    return total + high - low
