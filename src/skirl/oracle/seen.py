"""Which rows exist: one bit per row, so that a row's first use needs no request to the store. Tables of more than 2**33
rows have a set of keys instead, since their bits would not fit into the address space."""

import numpy as np

from skirl.core.keys import MAX_ROWS, ROW_BITS, row_of, table_of
from skirl.core.tables import Schema
from skirl.tools.hash_index import HashIndex
from skirl.tools.jit import kernel

MOST_IN_BITS = 1 << 33
_PIECE = 1 << 16
"""Words read at a time. Zero pages that are only read stay unbacked."""


class Seen:
    def __init__(self, schema: Schema) -> None:
        self._tables = schema.tables
        small = np.array([t.rows <= MOST_IN_BITS for t in schema.tables])
        words = np.array([(t.rows + 63) // 64 for t in schema.tables], np.int64) * small
        begin = np.concatenate([[0], np.cumsum(words)[:-1]]).astype(np.int64)
        self.base = np.where(small, begin, -1)
        """[tables]: the first word of the table's bits; -1: its rows are in the set."""
        self.bits = np.zeros(1 + int(words.sum()), np.uint64)  # zero pages are not backed until written
        self.set = HashIndex()
        self.any_in_set = not small.all()

    def add(self, keys: np.ndarray) -> None:
        """Record that these rows exist. Raise for keys of other tables, which may be in a store that someone else filled."""
        self._check(keys)
        self.note(keys)

    def note(self, keys: np.ndarray) -> None:
        """Record that these rows exist. They must be rows of these tables."""
        _set(self.bits, self.base, keys, True)
        if len(large := self._in_set(keys)):
            self.set.put(large, np.zeros(len(large), np.int32))

    def add_all(self, table: int) -> None:
        """Record that every row of a table of at most `MOST_IN_BITS` rows exists."""
        whole, rest = divmod(self._tables[table].rows, 64)
        begin = int(self.base[table])
        self.bits[begin : begin + whole] = ~np.uint64(0)
        if rest:
            self.bits[begin + whole] = np.uint64((1 << rest) - 1)

    def claim(self, keys: np.ndarray) -> np.ndarray:
        """Record that these rows exist, which are of tables in the set. Return for each whether it existed before."""
        return self.set.put(keys, np.zeros(len(keys), np.int32))

    def discard(self, keys: np.ndarray) -> None:
        """Record that these rows do not exist: their step was never executed."""
        _set(self.bits, self.base, keys, False)
        self.set.drop(self._in_set(keys))

    def has(self, keys: np.ndarray) -> np.ndarray:
        words, rows = self.base[table_of(keys)], row_of(keys)
        out = self.bits[np.where(words < 0, 0, words + (rows >> 6))] >> (rows & 63).astype(np.uint64) & np.uint64(1) > 0
        out[words < 0] = self.set.get(keys[words < 0]) >= 0
        return out

    def _in_set(self, keys: np.ndarray) -> np.ndarray:
        return keys[self.base[table_of(keys)] < 0] if self.any_in_set else keys[:0]

    def clear(self) -> None:
        self.bits = np.zeros_like(self.bits)
        self.set = HashIndex()

    def _check(self, keys: np.ndarray) -> None:
        """Raise for a row that its table lacks: its bit would be another row's, or none at all."""
        rows = np.array([t.rows for t in self._tables], np.int64)
        table = table_of(keys)
        known = (table >= 0) & (table < len(rows))
        good = known & (row_of(keys) < rows[np.where(known, table, 0)])
        if not good.all():
            key = int(keys[np.argmin(good)])
            number, row = table_of(key), row_of(key)
            there = f"only {len(rows)} tables are given"
            if 0 <= number < len(rows):
                there = f"table {self._tables[number].name!r} has rows 0 to {rows[number] - 1} only"
            raise ValueError(
                f"the store holds row {row} of table number {number}, but {there}: pass the tables, each with as many rows, "
                "that the store was filled with"
            )

    def __len__(self) -> int:
        return _ones(self.bits) + len(self.set)

    def of(self, table: int) -> int:
        begin, words = int(self.base[table]), (self._tables[table].rows + 63) // 64
        if begin < 0:
            return int(np.count_nonzero(self.set.keys[self.set.keys >= 0] >> ROW_BITS == table))
        return _ones(self.bits[begin : begin + words])


def _ones(bits: np.ndarray) -> int:
    return sum(int(np.bitwise_count(bits[i : i + _PIECE]).sum()) for i in range(0, len(bits), _PIECE))


@kernel
def _set(bits, base, keys, exist):
    for key in keys:
        words = base[key >> ROW_BITS]
        if words >= 0:
            row = key & (MAX_ROWS - 1)
            word, bit = words + (row >> 6), np.uint64(1) << np.uint64(row & 63)
            bits[word] = bits[word] | bit if exist else bits[word] & ~bit
