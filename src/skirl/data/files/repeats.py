"""Reads lists that a file leaves out because they equal those of the row above.

They are null in the file. A column of runs says how many rows above each list is stored.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from skirl.data.files.columns import GOOD, is_list, kinds_of, one, pc
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel


def share(columns: dict[str, Any], schema: FileSchema) -> tuple[int, str] | None:
    """Replace list columns of a row group that leave lists out with dictionary arrays: each list once, an index per row.

    Return None, or the first wrong row and what was found in it.
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
            return 0, f"leaves out the list of column {name!r}, but the first row of a row group must store it"
        said = (pc.fill_null(runs, -1) if runs.null_count else runs).to_numpy()
        inverse, offsets = np.empty(len(lists), np.int32), lists.offsets.to_numpy()
        begins = np.empty_like(offsets)
        row, count, hidden = _follow(written, said, offsets, inverse, begins)
        if row >= 0:
            above = row - int(np.flatnonzero(written[: row + 1])[-1])
            is_there = "in this row" if written[row] else f"{above:,} rows above"
            return row, f"has {said[row]} in column {spec.run!r}, but the list of column {name!r} is stored {is_there}"
        kept = pa.array(begins[: count + 1])
        there = lists.drop_null() if hidden else type(lists).from_arrays(kept, lists.values)
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(inverse), there, safe=False)
    return None


@kernel
def _follow(written, said, offsets, inverse, begins):
    """Fill `inverse` with the list that each row uses, and `begins` with where each list begins and the last one ends.

    Return the first row whose run contradicts the nulls, or -1; the number of lists; and whether some null hides ids.
    """
    last, lists, hidden = 0, -1, False
    for row in range(len(written)):
        if written[row]:
            last = row
            lists += 1
            begins[lists] = offsets[row]
        elif offsets[row] != offsets[row + 1]:
            hidden = True
        if said[row] != row - last:
            return row, 0, hidden
        inverse[row] = lists
    begins[lists + 1] = offsets[len(written)]
    return -1, lists + 1, hidden


def is_shared(column: Any) -> bool:
    """Return whether a column stores each list once for all rows that share it."""
    return pt.is_dictionary(column.type) and is_list(column.type.value_type)


def shared_lists(column: Any) -> tuple[Any, np.ndarray | None]:
    """Return the lists that some row uses, and the list of each row (int64); for any other column, the column and None."""
    if not is_shared(column):
        return column, None
    inverse = column.indices.to_numpy().astype(np.int64)
    there = np.zeros(len(column.dictionary), bool)
    there[inverse] = True
    if there.all():
        return column.dictionary, inverse
    return column.dictionary.take(pa.array(np.flatnonzero(there))), (np.cumsum(there) - 1)[inverse]
