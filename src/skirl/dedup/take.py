"""Rows of an Arrow batch in another order, lists copied whole: several times as fast as Arrow's, which takes id by id."""

from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.encoded import gather_from
from skirl.tools.jit import read_only


def taken(rows: Any, places: np.ndarray) -> Any:
    """These rows of a batch, in this order: a batch.

    **Arguments**

    - `rows`: the batch.
    - `places`: int64: which rows.
    """
    index = pa.array(places)
    columns = [_lists(c, places) if _plain(c) else c.take(index) for c in rows.columns]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _plain(column: Any) -> bool:
    """Whether a column has lists of numbers, all of them there."""
    kind = column.type
    if not pa.types.is_list(kind) or column.null_count:
        return False
    inside = kind.value_type
    numbers = pa.types.is_integer(inside) or pa.types.is_float32(inside) or pa.types.is_float64(inside)
    return numbers and not column.values.null_count


def _lists(column: Any, places: np.ndarray) -> Any:
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    begins, sizes = offsets[:-1][places].astype(np.int64), np.diff(offsets)[places].astype(np.int64)
    own = np.zeros(len(places) + 1, np.int64)
    np.cumsum(sizes, out=own[1:])
    if own[-1] > np.iinfo(np.int32).max:
        return column.take(pa.array(places))
    out = np.empty(own[-1], values.dtype)
    gather_from(read_only(values), begins, sizes, out)
    return pa.ListArray.from_arrays(pa.array(own.astype(np.int32)), pa.array(out), type=column.type)
