"""A sample of whole sessions from a stream of rows, in a fixed amount of memory."""

from typing import Any

import numpy as np
import pyarrow as pa

from skirl.dedup.finish import keys_of
from skirl.dedup.frames import KEYS


class Sample:
    """Keeps the rows of sessions with small hashes, and halves the number of sessions whenever it gets too large.

    **Arguments**

    - `most`: bytes of rows to keep.
    - `stretch`: rows to keep from the beginning of the data, whatever their sessions, in their original order.
    """

    def __init__(self, most: int, stretch: int) -> None:
        self._most, self._stretch = most, stretch
        self.rows = 0
        """Number of rows added."""
        self.level = 0
        """One in 2 ** level sessions is kept."""
        self.cut = False
        """True if one session alone was too large, so that rows are missing."""
        self._kept: list[Any] = []
        self._first: list[Any] = []
        self._bytes = 0

    def add(self, table: Any) -> None:
        """Add rows with their sort keys."""
        here = sum(map(len, self._first))
        if here < self._stretch and sum(t.nbytes for t in self._first) < self._most // 4:
            self._first.append(table.slice(0, self._stretch - here))
        self.rows += len(table)
        if self.cut:
            return
        self._keep(self._chosen(table))
        while self._bytes > self._most:
            self.level += 1
            kept, self._kept, self._bytes = self._kept, [], 0
            for each in kept:
                self._keep(self._chosen(each))
            if not self._kept:  # this would drop the last session
                self.level, self.cut, self._kept = self.level - 1, True, kept
                break

    def _keep(self, table: Any) -> None:
        if len(table):
            self._kept.append(table)
            self._bytes += table.nbytes

    def _chosen(self, table: Any) -> Any:
        if not self.level:
            return table
        low = keys_of(table)[0][:, 1]
        return table.take(pa.array(np.flatnonzero(low >> np.uint64(64 - self.level) == 0)))

    def kept(self) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the sampled rows in their original order, and their sort keys: hashes and times."""
        table = pa.concat_tables(self._kept).combine_chunks()
        return table.drop_columns(list(KEYS)), *keys_of(table)

    def stretch(self) -> Any:
        """Return the first rows, in their original order."""
        return pa.concat_tables(self._first).combine_chunks().drop_columns(list(KEYS))
