"""Lists that a file leaves out where they equal the row above's: null there, and counted by a column of runs; and lists that
are windows of one above."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from skirl.data.files.columns import is_list, kinds_of, one, pc
from skirl.data.files.hashing import GOOD
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel


def share(columns: dict[str, Any], schema: FileSchema) -> tuple[int, str] | None:
    """Put columns with what was left out in place of those of a row group: dictionaries of lists, and places in them.

    What is wrong, if anything: the row, and what was found in it.
    """
    for spec in schema.ids:
        if not spec.run:
            continue
        name = spec.column or spec.name
        lists, runs = (one(columns[of]) for of in (name, spec.run))
        if not (pt.is_list(lists.type) or pt.is_large_list(lists.type)) or not pt.is_integer(runs.type):
            return 0, f"has no list in column {name!r}, or no whole number in {spec.run!r}"
        if not len(lists):
            continue
        written = kinds_of(lists) == GOOD
        if not written[0]:
            return 0, f"leaves out the list of column {name!r}, and a row group begins with whole rows"
        said = (pc.fill_null(runs, -1) if runs.null_count else runs).to_numpy()
        inverse = np.empty(len(lists), np.int32)
        if (row := _follow(written, said, inverse)) >= 0:
            above = row - int(np.flatnonzero(written[: row + 1])[-1])
            is_there = "is there" if written[row] else f"was last there {above:,} rows above"
            return row, f"has {said[row]} in column {spec.run!r}, and the list of column {name!r} {is_there}"
        there = _there(lists, written)
        if spec.start:
            starts, lengths = (one(columns[of]) for of in (spec.start, spec.length))
            found = _windows(there, inverse, starts, lengths)
            if isinstance(found, tuple):
                row, said = found
                return row, f"{said} in columns {spec.start!r} and {spec.length!r}, of the list of column {name!r}"
            columns[name] = found
            continue
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(inverse), there)
    return None


def _windows(there: Any, inverse: np.ndarray, starts: Any, lengths: Any) -> Any:
    """Lists that are parts of others, which lie where those lie; or the row of one that is not, and what it says."""
    if not (pt.is_integer(starts.type) and pt.is_integer(lengths.type)):
        return 0, "has no whole numbers"
    begin, size = (pc.fill_null(of, -1).to_numpy().astype(np.int64) for of in (starts, lengths))
    offsets = there.offsets.to_numpy().astype(np.int64)
    which, first = np.empty(len(inverse), np.int32), np.empty(len(inverse), np.int64)
    count = _number_windows(inverse, begin, size, np.diff(offsets), which, first)
    if count < 0:
        row = -1 - count
        ids = int(np.diff(offsets)[inverse[row]])
        return row, f"has a window outside its buffer: {starts[row]} + {lengths[row]} of {ids:,} ids"
    first = first[:count]
    begins = (offsets[:-1][inverse[first]] + begin[first]).astype(offsets.dtype)
    large = pt.is_large_list(there.type)
    kind, number = (pa.LargeListViewArray, pa.int64()) if large else (pa.ListViewArray, pa.int32())
    views = kind.from_arrays(pa.array(begins, number), pa.array(size[first], number), there.values)
    return pa.DictionaryArray.from_arrays(pa.array(which), views)


@kernel
def _number_windows(inverse, begin, size, ids, which, first):
    """Number windows that differ from the one above, and their first rows: how many; -1 - row where one is outside."""
    count = 0
    for row in range(len(inverse)):
        if begin[row] < 0 or size[row] < 0 or begin[row] + size[row] > ids[inverse[row]]:
            return -1 - row
        same = (
            row > 0 and inverse[row] == inverse[row - 1] and begin[row] == begin[row - 1] and size[row] == size[row - 1]
        )
        if not same:
            first[count] = row
            count += 1
        which[row] = count - 1
    return count


@kernel
def _follow(written, said, inverse):
    """Which of the lists that are there each row has; the first row whose run does not say how far above that is, or -1."""
    last, lists = 0, -1
    for row in range(len(written)):
        if written[row]:
            last = row
            lists += 1
        if said[row] != row - last:
            return row
        inverse[row] = lists
    return -1


def _there(lists: Any, written: np.ndarray) -> Any:
    """The lists that are not null, where they lie if there is nothing between them."""
    offsets = lists.offsets.to_numpy()
    if not written.all() and (offsets[1:] != offsets[:-1])[~written].any():
        return lists.drop_null()
    kept = pa.array(np.append(offsets[:-1][written], offsets[-1]))
    return type(lists).from_arrays(kept, lists.values)


def is_shared(column: Any) -> bool:
    """Whether a column has lists once for all rows that have them."""
    return pt.is_dictionary(column.type) and (is_list(column.type.value_type) or is_views(column.type.value_type))


def is_views(kind: Any) -> bool:
    """Whether values of this type are lists that may lie over each other."""
    return pt.is_list_view(kind) or pt.is_large_list_view(kind)


def shared_lists(column: Any) -> tuple[Any, np.ndarray | None]:
    """The lists that some row has, and int64: which of them each row has; of any other column, itself."""
    if not is_shared(column):
        return column, None
    inverse = column.indices.to_numpy().astype(np.int64)
    there = np.zeros(len(column.dictionary), bool)
    there[inverse] = True
    if there.all():
        return column.dictionary, inverse
    lists, kept = column.dictionary, np.flatnonzero(there)
    if is_views(lists.type):
        parts = (pa.array(of.to_numpy()[kept]) for of in (lists.offsets, lists.sizes))
        some = type(lists).from_arrays(*parts, lists.values)
    else:
        some = lists.take(pa.array(kept))
    return some, (np.cumsum(there) - 1)[inverse]
