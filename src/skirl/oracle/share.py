"""The rows of tables that one of several owners has, numbered without gaps, so that their states can be in an array.

A word describes 32 rows of a table: which of them the owner has (lower half), and the first one's number (upper half).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.placement import Placement, site_in
from skirl.core.tables import Schema
from skirl.tools.jit import kernel, ones

_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """The rows that an owner has."""

    placement: Placement
    site: int

    def rows_of(self, rows: int) -> int:
        """Return about how many of a table's rows it has."""
        begin, end = self.placement.ranges[self.site]
        return rows * (end - begin) >> 64


class Numbered:
    """Numbers for all rows of some tables that an owner has.

    >>> from skirl import Table
    >>> schema = Schema.of([Table("a", 8, 4), Table("b", 4, 4)])
    >>> numbered = Numbered(schema, [0, 1], OwnedRows(Placement.even(2), 1))
    >>> [number_of(numbered.words, numbered.begin[0], row) for row in range(8)]
    [0, 1, 2, -1, -1, -1, 3, -1]
    >>> numbered.end
    6
    """

    def __init__(self, schema: Schema, tables: Sequence[int], share: OwnedRows | None, first: int = 0) -> None:
        self.begin = np.full(len(schema.tables), -1, np.int64)
        """[all tables]: the word of the table's row 0; -1: its rows have no numbers."""
        words = [-(-schema.tables[table].rows // 32) for table in tables]
        self.begin[list(tables)] = np.cumsum([0, *words])[:-1]
        self.words = np.zeros(sum(words), np.uint64)
        self.end = first
        """The number that one more row would have."""
        for table in tables:
            assert share is not None
            words, of = self.words[self.begin[table] :], schema.tables[table].rows
            self.end = int(_mark(words, table << ROW_BITS, of, share.site, self.end, *share.placement.arrays))


@kernel
def number_of(words, begin, row):
    """Return the number of a row of a table whose words begin at `begin`, in a kernel; -1: the owner does not have it."""
    word = words[begin + (row >> 5)]
    bit = np.uint64(1) << np.uint64(row & 31)
    if word & bit == np.uint64(0):
        return np.int64(-1)
    return np.int64(word >> _HALF) + ones(word & (bit - np.uint64(1)))


@kernel
def _mark(words, high, rows, site, end, salt, guess, lasts):
    """Fill a table's words. `end` is the number of its first row. Return that of the next table's first row."""
    for i in range((rows + 31) >> 5):
        word = np.uint64(0)
        for row in range(32 * i, min(32 * i + 32, rows)):
            mine = site_in(high | row, salt, guess, lasts) == site
            word |= np.uint64(mine) << np.uint64(row & 31)
        words[i] = np.uint64(end) << _HALF | word
        end += ones(word)
    return end
