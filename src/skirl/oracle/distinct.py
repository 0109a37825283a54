"""The distinct rows of a batch, table by table, and which of them each position has.

The order is guaranteed: the rows of a table are in the order of their last position in the batch.
"""

import numpy as np

from skirl.core.positions import PartsByTable, Positions
from skirl.core.tables import Schema
from skirl.tools.jit import kernel

_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class DistinctRows:
    """The distinct rows of one batch. `found` is scratch that the next batch overwrites.

    Table t's distinct rows are found[low[t]:at[t + 1]], in order of last position. Counted over all tables, they begin
    at first[t]. `row_of` gives for each position the index of its row among its table's distinct rows.
    """

    __slots__ = ("first", "found", "low", "row_of")

    def __init__(self, found: np.ndarray, low: np.ndarray, first: np.ndarray, row_of: np.ndarray) -> None:
        self.found, self.low, self.first, self.row_of = found, low, first, row_of


class OutOfRange(ValueError):
    """A row that its table does not have. `value` is the index in `Positions.values`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"the id at {value} is outside its table")
        self.value = value


class Finder:
    """Finds the distinct rows of one bank's batches. Owns the scratch arrays."""

    def __init__(self, schema: Schema, bank: int) -> None:
        self.tables = np.array(schema.banks[bank].tables, np.int64)
        """The bank's tables, in its order."""
        self._local = np.full(len(schema.tables), -1, np.int64)
        self._local[self.tables] = np.arange(len(self.tables))
        self._rows = np.array([schema.tables[t].rows for t in self.tables], np.int64)
        self._marks = np.empty((0, 0), np.uint16)
        self._found = np.empty(0, np.int64)
        self._whole = np.array([0, len(self.tables)])

    def layout(self, batch: Positions) -> PartsByTable:
        """Return a batch's parts by table."""
        return PartsByTable(batch, self._local, len(self.tables))

    def find_all(self, batch: Positions) -> tuple[PartsByTable, DistinctRows]:
        """Return the layout and the distinct rows, found in this thread."""
        layout = self.layout(batch)
        return layout, self.find(batch, layout, self._whole, lambda kernel, *args: kernel(*args, 0, 1))

    def find(self, batch: Positions, layout: PartsByTable, borders: np.ndarray, run) -> DistinctRows:
        """Find the distinct rows. `run(kernel, *args)` calls the kernel for every stretch of tables between `borders`."""
        most = layout.most
        kind = np.uint16 if most < 0xFFFF else np.int32
        places = 1 << max(4, (4 * most - 1).bit_length())
        if self._marks.dtype != kind or self._marks.shape[1] < places or len(self._marks) < len(borders) - 1:
            self._marks = np.empty((len(borders) - 1, places), kind)
        if len(self._found) < layout.positions:
            self._found = np.empty(layout.positions * 5 // 4, np.int64)
        row_of = np.empty(layout.positions, kind)
        low, bad = np.empty(len(self._rows), np.int64), np.empty(len(self._rows), np.int64)
        none = kind(0xFFFF) if kind is np.uint16 else kind(-1)
        run(
            _find, borders, self._marks, batch.values, layout.parts, layout.first, layout.at, self._rows, self._found, low,
            row_of, bad, none,
        )  # fmt: skip
        first = np.empty(len(self._rows) + 1, np.int64)
        outside = _count(layout.at, low, bad, first)
        if outside >= 0:
            raise OutOfRange(outside)
        return DistinctRows(self._found, low, first, row_of)


@kernel
def _find(borders, marks, values, parts, first, at, rows, found, low, row_of, bad, none, lo, hi):
    """Find rows for stretches lo..hi of tables. Positions are read from the last one on, and rows written from the end.

    Indices are unsigned or known not to be negative. Otherwise each would be checked for wrapping around from the end.
    """
    places = marks.shape[1]
    bits = 0
    while (1 << bits) < places:
        bits += 1
    shift, wrap, one = np.uint64(64 - bits), np.uint64(places - 1), np.uint64(1)
    for stretch in range(lo, hi):
        mark = marks[stretch]
        for t in range(borders[stretch], borders[stretch + 1]):
            n = at[t + 1] - at[t]
            low[t], bad[t] = at[t + 1], -1
            if n == 0:
                continue
            mine = found[at[t] : at[t + 1]]
            limit = np.uint64(rows[t])
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
                        if row >= limit:
                            bad[t] = parts[i, 0] + p
                            return
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
                        if row >= limit:
                            bad[t] = parts[i, 0] + p
                            return
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
def _count(at, low, bad, first):
    """Fill `first`, [tables + 1]. Return the first bad value, or -1."""
    first[0] = 0
    for t in range(len(low)):
        if bad[t] >= 0:
            return bad[t]
        first[t + 1] = first[t] + at[t + 1] - low[t]
    return -1
