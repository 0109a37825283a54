"""Lists that a file leaves out where they equal the row above's: null there, and counted by a column of runs."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from skirl.data.files.columns import is_list, kinds_of, pc
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
        lists, runs = (_one(columns[of]) for of in (name, spec.run))
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
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(inverse), _there(lists, written))
    return None


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
    return pt.is_dictionary(column.type) and is_list(column.type.value_type)


def shared_lists(column: Any) -> tuple[Any, np.ndarray | None]:
    """The lists that some row has, and int64: which of them each row has; of any other column, itself."""
    if not is_shared(column):
        return column, None
    inverse = column.indices.to_numpy().astype(np.int64)
    there = np.zeros(len(column.dictionary), bool)
    there[inverse] = True
    if there.all():
        return column.dictionary, inverse
    return column.dictionary.take(pa.array(np.flatnonzero(there))), (np.cumsum(there) - 1)[inverse]


def _one(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
