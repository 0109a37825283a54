"""Keeps looked-up rows at hand while nothing trains them: prediction batches have most rows in common."""

import numpy as np

from skirl.engine.access import peek_distinct
from skirl.engine.engine import Engine
from skirl.engine.kernels.buffers import empty
from skirl.engine.row_numbers import RowNumbers
from skirl.tools.hash_index import HashIndex

LIMIT = 64 << 20
"""Bytes of rows, over all banks, that are kept at most. The index may take as much again."""


class Remembered:
    """Weights of rows as the last executed step left them. Valid until the next step, and for use by one thread."""

    def __init__(self, engine: Engine, limit: int = LIMIT) -> None:
        share = limit // len(engine.schema.banks)
        self._banks = [_Bank(engine, bank, share) for bank in range(len(engine.schema.banks))]

    def find(self, keys: np.ndarray, bank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an array of rows, and the index of each key's row in it. Rows already in the array do not change."""
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
            self._forget()  # the index has numbers without rows
            raise
        return self._rows, places

    def _append(self, new: np.ndarray) -> None:
        """Look up the rows of new keys and append them."""
        if not len(new):
            return
        end = len(self._index)
        begin = end - len(new)
        if end > len(self._rows):
            rows = empty(max(end, min(2 * end, self._most)) * self._dim, self._engine.dtype).reshape(-1, self._dim)
            rows[:begin] = self._rows[:begin]
            self._rows = rows
        self._rows[begin:end] = peek_distinct(self._engine, new, self._bank)[:, : self._dim]
