"""Lists that a file leaves out where they equal the row above's: null there, and counted by a column of runs."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from skirl.data.files.columns import is_list, kinds_of, pc
from skirl.data.files.hashing import GOOD
from skirl.data.files.schema import FileSchema


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
        rows = np.arange(len(lists))
        above = rows - np.maximum.accumulate(np.where(written, rows, 0))
        said = pc.fill_null(runs, -1).to_numpy(zero_copy_only=False)
        if (said != above).any():
            row = int(np.argmax(said != above))
            is_there = "is there" if written[row] else f"was last there {above[row]:,} rows above"
            return row, f"has {said[row]} in column {spec.run!r}, and the list of column {name!r} {is_there}"
        inverse = np.cumsum(written) - 1
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(inverse, pa.int32()), lists.drop_null())
    return None


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
