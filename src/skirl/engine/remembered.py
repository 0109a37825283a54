"""Rows that were looked up stay at hand while nothing trains them: batches that are predicted have most rows in common."""

import numpy as np

from skirl.engine.access import peek_distinct
from skirl.engine.engine import Engine
from skirl.engine.kernels.buffers import empty
from skirl.engine.row_numbers import RowNumbers
from skirl.tools.hash_index import HashIndex

LIMIT = 64 << 20
"""Bytes of rows, over all banks, from which they are forgotten; the index takes up to as much again."""


class Remembered:
    """The weights of rows as the executed steps left them, for as long as no step comes; by one thread.

    **Arguments**

    - `engine`: whose rows.
    - `limit`: bytes of rows. When a batch would exceed them, all are forgotten, and those of the batch are looked up.
    """

    def __init__(self, engine: Engine, limit: int = LIMIT) -> None:
        share = limit // len(engine.schema.banks)
        self._banks = [_Bank(engine, bank, share) for bank in range(len(engine.schema.banks))]

    def find(self, keys: np.ndarray, bank: int) -> tuple[np.ndarray, np.ndarray]:
        """An array of rows, and the place of each key's row in it. What is in it stays as it is."""
        return self._banks[bank].find(keys)


class _Bank:
    def __init__(self, engine: Engine, bank: int, limit: int) -> None:
        self._engine, self._bank = engine, bank
        self._dim = engine.schema.banks[bank].dim
        self._most = max(1, limit // (self._dim * engine.dtype.itemsize))
        self._small = RowNumbers.nbytes(engine.schema, bank) <= limit
        self._forget()

    def _forget(self) -> None:
        self._index = RowNumbers(self._engine.schema, self._bank) if self._small else HashIndex()
        self._rows = np.empty((0, self._dim), self._engine.dtype)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        new, places = self._index.number(keys)
        if len(new) < len(self._index) > self._most:
            self._forget()
            new, places = self._index.number(keys)
        try:
            self._append(new)
        except BaseException:
            self._forget()  # numbers without rows
            raise
        return self._rows, places

    def _append(self, new: np.ndarray) -> None:
        """The rows of keys that are new, behind those that are here."""
        if not len(new):
            return
        end = len(self._index)
        begin = end - len(new)
        if end > len(self._rows):
            rows = empty(max(end, min(2 * end, self._most)) * self._dim, self._engine.dtype).reshape(-1, self._dim)
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        self._rows[begin:end] = peek_distinct(self._engine, new, self._bank)[:, : self._dim]
