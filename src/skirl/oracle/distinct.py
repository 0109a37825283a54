"""The distinct rows of a batch, table by table, and which of them each position has. The rows of a table are in the
order of their last position in the batch."""

from dataclasses import dataclass

import numpy as np

from skirl.core.ids import BankIds
from skirl.core.tables import Schema
from skirl.tools.jit import kernel

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(slots=True)
class BatchRows:
    """The rows of one bank that a batch uses: table t's are found[low[t]:at[t + 1]], in order of their last position."""

    parts: np.ndarray
    """int64 [parts, 4], by table: begin and end in the values, the number to subtract, and the part's first position."""
    part_at: np.ndarray
    """[tables + 1]: each table's first part."""
    at: np.ndarray
    """[tables + 1]: number of positions in all previous tables."""
    found: np.ndarray
    """Scratch that the next batch overwrites."""
    low: np.ndarray
    first: np.ndarray
    """[tables + 1]: the index of each table's first row among all distinct rows."""
    row_of: np.ndarray
    """For each position, the index of its row among its table's distinct rows."""

    # In the window of a planner.
    place: int = -1
    """Place of its first use. The others follow."""
    next_uses: np.ndarray | None = None

    @property
    def positions(self) -> int:
        return int(self.at[-1])

    @property
    def total(self) -> int:
        return int(self.first[-1])


class Finder:
    """Finds the distinct rows of one bank's batches. Owns the scratch arrays."""

    def __init__(self, schema: Schema, bank: int) -> None:
        self.tables = np.array(schema.banks[bank].tables, np.int64)
        self._local = np.full(len(schema.tables), -1, np.int64)
        self._local[self.tables] = np.arange(len(self.tables))
        self.rows = np.array([schema.tables[t].rows for t in self.tables], np.int64)
        self._marks = np.empty(0, np.uint16)
        self._found = np.empty(0, np.int64)

    def find(self, batch: BankIds) -> BatchRows:
        parts, tables = np.empty((len(batch.parts), 4), np.int64), len(self.tables)
        part_at, at = np.zeros(tables + 1, np.int64), np.zeros(tables + 1, np.int64)
        most, total = int(_by_table(batch.parts, self._local, parts, part_at, at)), int(at[-1])
        kind = np.uint16 if most < 0xFFFF else np.int32
        places = 1 << max(4, (4 * most - 1).bit_length())
        if self._marks.dtype != kind or len(self._marks) < places:
            self._marks = np.empty(places, kind)
        if len(self._found) < total:
            self._found = np.empty(total * 5 // 4, np.int64)
        row_of = np.empty(total, kind)
        low = np.empty(tables, np.int64)
        none = kind(0xFFFF) if kind is np.uint16 else kind(-1)
        _find(self._marks, batch.values, parts, part_at, at, self.rows, self._found, low, row_of, none)
        first = np.zeros(tables + 1, np.int64)
        np.cumsum(at[1:] - low, out=first[1:])
        return BatchRows(parts, part_at, at, self._found, low, first, row_of)


@kernel
def _find(mark, values, parts, first, at, rows, found, low, row_of, none):
    """Find the rows of each table. All ids are in their table. Positions are read from the last one on, and rows written
    from the end. Indices are unsigned or known not to be negative. Otherwise each would be
    checked for wrapping around from the end."""
    places = len(mark)
    bits = 0
    while (1 << bits) < places:
        bits += 1
    shift, wrap, one = np.uint64(64 - bits), np.uint64(places - 1), np.uint64(1)
    for t in range(len(rows)):
        n = at[t + 1] - at[t]
        low[t] = at[t + 1]
        if n == 0:
            continue
        mine = found[at[t] : at[t + 1]]
        w = n
        direct = rows[t] <= places
        mark[: rows[t] if direct else places] = none
        for i in range(first[t + 1] - 1, first[t] - 1, -1):
            part = values[parts[i, 0] : parts[i, 1]]
            minus = parts[i, 2]
            of = row_of[parts[i, 3] : parts[i, 3] + len(part)]
            if direct:
                for p in range(len(part) - 1, -1, -1):
                    row = np.uint64(part[p] - minus)
                    r = mark[row]
                    if r == none:
                        w -= 1
                        mine[w] = row
                        r = of.dtype.type(w)
                        mark[row] = r
                    of[p] = r
            else:
                for p in range(len(part) - 1, -1, -1):
                    row = np.uint64(part[p] - minus)
                    place = (row * _SPREAD) >> shift
                    r = mark[place]
                    while r != none and mine[r] != np.int64(row):
                        place = (place + one) & wrap
                        r = mark[place]
                    if r == none:
                        w -= 1
                        mine[w] = row
                        r = of.dtype.type(w)
                        mark[place] = r
                    of[p] = r
        low[t] = at[t] + w
        for i in range(first[t], first[t + 1]):
            of = row_of[parts[i, 3] : parts[i, 3] + parts[i, 1] - parts[i, 0]]
            for p in range(len(of)):
                of[p] -= of.dtype.type(w)


@kernel
def _by_table(parts, local, out, first, at):
    """Sort parts by table, stably, into out; first and at must be zeros. Return the most positions of any table. Parts
    of tables outside the bank, whose index is -1, are put before the first table; the planner refuses them."""
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
