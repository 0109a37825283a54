"""Keys: int64 names of rows, with the table in the upper 16 bits and the row in the lower 48. Positions: a batch's ids as
the planner takes them, the loader's own array and the parts of it that belong to each table."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.tools.jit import kernel

ROW_BITS = 48
MAX_ROWS = 1 << ROW_BITS
MAX_TABLES = 1 << 15  # keys stay non-negative


def table_of(keys: Any) -> Any:
    """Return the table of a key, or of each key of an array."""
    return keys >> ROW_BITS


def row_of(keys: Any) -> Any:
    return keys & (MAX_ROWS - 1)


def key_of(table: Any, rows: Any) -> Any:
    return table << ROW_BITS | rows


@dataclass(frozen=True, slots=True)
class Positions:
    """The ids of one batch that belong to one bank; positions are numbered part after part."""

    values: np.ndarray
    """int64 or int32: rows or keys; values outside all parts belong to other banks."""
    parts: np.ndarray
    """int64 [parts, 4]: table, begin and end in `values`, and the number to subtract from a value to get its row."""

    @classmethod
    def of(cls, batch: "Positions | np.ndarray") -> "Positions":
        """Build from an array of keys; a new part begins wherever the table changes."""
        if isinstance(batch, Positions):
            return batch
        keys = np.asarray(batch, np.int64)
        tables = keys >> ROW_BITS
        begin = np.flatnonzero(np.diff(tables, prepend=-1))
        end = np.append(begin[1:], len(keys))[: len(begin)]
        table = tables[begin]
        return cls(keys, np.stack([table, begin, end, table << ROW_BITS], axis=1))

    @classmethod
    def joined(cls, batches: "list[Positions]") -> "Positions":
        if len(batches) == 1:
            return batches[0]
        parts, shift = [], 0
        for batch in batches:
            parts.append(batch.parts + np.array([0, shift, shift, 0]))
            shift += len(batch.values)
        return cls(np.concatenate([batch.values for batch in batches]), np.concatenate(parts))

    def __len__(self) -> int:
        return int((self.parts[:, 2] - self.parts[:, 1]).sum())

    def keys(self) -> np.ndarray:
        keys = np.empty(len(self), np.int64)
        _keys(self.values, self.parts, keys)
        return keys


@kernel
def _keys(values, parts, keys):
    n = 0
    for i in range(len(parts)):
        shift = (parts[i, 0] << ROW_BITS) - parts[i, 3]
        for v in range(parts[i, 1], parts[i, 2]):
            keys[n] = values[v] + shift
            n += 1
