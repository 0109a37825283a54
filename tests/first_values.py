"""First weights of rows, as the kernels make them."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skirl.core.initial import Initial, InitialTable, fill
from skirl.core.keys import table_of


def first_rows(keys: Any, initial: Initial, dim: int, seed: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return the initial weights of some keys, all with one initialiser."""
    keys = np.asarray(keys, np.int64)
    table = InitialTable.of([initial], dtype)
    tables = int(table_of(keys.max(initial=0))) + 1
    kind, scale = np.repeat(table.kind, tables), np.repeat(table.scale, tables)
    out = np.empty((keys.size, dim), dtype)
    slots = np.arange(keys.size, dtype=np.int32)
    fill(keys, slots, out, dim, seed, kind, scale, table.quantiles, 0.0, 0, keys.size)
    return out
