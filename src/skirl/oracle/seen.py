"""Which rows exist: one bit a row, so that a row's first use needs no request.

882.8M rows cost 110 MB, and only the pages of touched rows are ever backed by memory. A set of touched keys would cost 16
bytes or more a touched row and a random access into a far larger array for every row that comes in.
"""

from collections.abc import Iterable

import numpy as np
from numba import njit

from skirl.tables import MAX_ROWS, ROW_BITS, Schema


class Seen:
    """One bit for every row of every table: whether the row was ever used.

    >>> from skirl import Table
    >>> seen = Seen(Schema.of([Table("a", 100, 4)]))
    >>> seen.add(np.array([5, 99]))
    >>> seen.has(np.array([5, 6, 99])).tolist()
    [True, False, True]
    >>> seen.discard(np.array([5]))
    >>> len(seen)
    1
    """

    def __init__(self, schema: Schema) -> None:
        self._tables = schema.tables
        words = np.array([(t.rows + 63) // 64 for t in schema.tables], np.int64)
        self.base = np.concatenate([[0], np.cumsum(words)[:-1]]).astype(np.int64)
        self.bits = np.zeros(int(words.sum()), np.uint64)  # zero pages are not backed until written

    def add(self, keys: np.ndarray) -> None:
        """These rows exist now. Refuses keys of other tables: they may come from a store that someone else filled."""
        self._check(keys)
        _set(self.bits, self.base, keys)

    def discard(self, keys: np.ndarray) -> None:
        """These rows do not exist after all: their step was never executed."""
        _clear(self.bits, self.base, keys)

    def has(self, keys: np.ndarray) -> np.ndarray:
        """Whether each row exists."""
        return _test(self.bits, self.base, keys)

    def rebuild(self, chunks: Iterable[np.ndarray]) -> None:
        """Start from the keys that a store holds."""
        self.bits = np.zeros_like(self.bits)
        for keys in chunks:
            self.add(keys)

    def _check(self, keys: np.ndarray) -> None:
        """Outside its table a bit would be another row's, or none at all."""
        rows = np.array([t.rows for t in self._tables], np.int64)
        table = keys >> ROW_BITS
        known = (table >= 0) & (table < len(rows))
        good = known & (keys & (MAX_ROWS - 1) < rows[np.where(known, table, 0)])
        if not good.all():
            key = int(keys[np.argmin(good)])
            number, row = key >> ROW_BITS, key & (MAX_ROWS - 1)
            if not 0 <= number < len(rows):
                raise ValueError(
                    f"row {row} of table number {number} is there, of {len(rows)} tables: give the same tables"
                )
            raise ValueError(
                f"row {row} of table {self._tables[number].name!r} is there, which has rows 0 to {rows[number] - 1}: "
                "give the table as many rows as it had"
            )

    def __len__(self) -> int:
        return int(sum(np.bitwise_count(self.bits[i : i + 65536]).sum() for i in range(0, len(self.bits), 65536)))


@njit(nogil=True, cache=True)
def test_and_set(bits, base, key):
    """Mark one row as existing; whether it existed before."""
    row = key & (MAX_ROWS - 1)
    word = base[key >> ROW_BITS] + (row >> 6)
    bit = np.uint64(1) << np.uint64(row & 63)
    had = bits[word] & bit
    bits[word] |= bit
    return had != np.uint64(0)


@njit(nogil=True, cache=True)
def _set(bits, base, keys):
    for key in keys:
        test_and_set(bits, base, key)


@njit(nogil=True, cache=True)
def _clear(bits, base, keys):
    for key in keys:
        row = key & (MAX_ROWS - 1)
        bits[base[key >> ROW_BITS] + (row >> 6)] &= ~(np.uint64(1) << np.uint64(row & 63))


@njit(nogil=True, cache=True)
def _test(bits, base, keys):
    out = np.empty(len(keys), np.bool_)
    for i, key in enumerate(keys):
        row = key & (MAX_ROWS - 1)
        out[i] = (bits[base[key >> ROW_BITS] + (row >> 6)] >> np.uint64(row & 63)) & np.uint64(1) != np.uint64(0)
    return out
