"""A batch's ids as the planner takes them: the loader's own array, and the parts of it that belong to each table."""

from dataclasses import dataclass

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.tools.jit import kernel


@dataclass(frozen=True, slots=True)
class Positions:
    """The ids of one batch that belong to one bank; positions are numbered part after part."""

    values: np.ndarray
    """int64 or int32: rows or keys; values outside all parts belong to other banks."""
    parts: np.ndarray
    """int64 [parts, 4]: table, begin and end in `values`, and the number to subtract from a value to get its row."""
    inverse: int = 0
    """A hash of the batch's inverse, if samples share bags; 0 otherwise."""

    @classmethod
    def of(cls, batch: "Positions | np.ndarray") -> "Positions":
        """Build from an array of keys; a new part begins wherever the table changes.

        >>> Positions.of(np.array([5, 6, 1 << 48 | 7])).parts[:, :3].tolist()
        [[0, 0, 2], [1, 2, 3]]
        """
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
        """Concatenate the positions of several micro-batches."""
        if len(batches) == 1:
            return batches[0]
        parts, shift, inverse = [], 0, 0
        for batch in batches:
            parts.append(batch.parts + np.array([0, shift, shift, 0]))
            shift += len(batch.values)
            inverse = hash((inverse, batch.inverse)) if inverse or batch.inverse else 0
        return cls(np.concatenate([batch.values for batch in batches]), np.concatenate(parts), inverse)

    def __len__(self) -> int:
        return int((self.parts[:, 2] - self.parts[:, 1]).sum())

    def keys(self) -> np.ndarray:
        """Return the key of each position, int64."""
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


class PartsByTable:
    """A batch's parts sorted by table, tables in the bank's order."""

    __slots__ = ("at", "first", "most", "parts", "positions")

    def __init__(self, batch: Positions, local: np.ndarray, tables: int) -> None:
        """Sort the parts; `local` is the index of each table in the bank."""
        self.parts = np.empty((len(batch.parts), 4), np.int64)
        """int64 [parts, 4]: begin and end in `values`, the number to subtract, and the part's first position."""
        self.first = np.zeros(tables + 1, np.int64)
        """[tables + 1]: each table's first part."""
        self.at = np.zeros(tables + 1, np.int64)
        """[tables + 1]: number of positions in all previous tables."""
        self.most = int(_by_table(batch.parts, local, self.parts, self.first, self.at))
        """Number of positions of the largest table in the batch."""
        self.positions = int(self.at[-1])


@kernel
def _by_table(parts, local, out, first, at):
    """Sort parts by table, stably, into out; first and at must be zeros. Return the most positions of any table.

    Parts of tables outside the bank, whose index is -1, are put before the first table; the planner refuses them.
    """
    for part in parts:
        t = local[part[0]]
        first[t + 1] += 1
        at[t + 1] += part[2] - part[1]
    most = 0
    for t in range(len(at) - 1):
        most = max(most, at[t + 1])
        first[t + 1] += first[t]
        at[t + 1] += at[t]
    place, n = np.zeros(len(first) + 1, np.int64), 0
    for t in range(len(first)):  # assigning to a slice takes seconds to compile
        place[t + 1] = first[t]
    for part in parts:
        t = local[part[0]] + 1
        to = place[t]
        place[t] = to + 1
        out[to, 0], out[to, 1], out[to, 2], out[to, 3] = part[1], part[2], part[3], n
        n += part[2] - part[1]
    return most
