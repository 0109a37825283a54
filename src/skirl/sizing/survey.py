"""One pass over the ids of a run: which rows each batch uses.

Rows are numbered in order of first use. Each batch's distinct rows are kept in a file, 4 bytes each.
"""

import tempfile
from collections.abc import Iterator

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.ids import BankIds, capture, positions_of
from skirl.core.tables import ROW_BITS, Schema, Table
from skirl.oracle.distinct import Finder
from skirl.oracle.row_states import RowStates


class Survey:
    """The rows that a run uses, batch by batch, for use in a with-block: add every batch, then iterate."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.ids = 0
        self._banks = [_Bank(schema, bank) for bank in range(len(schema.banks))]

    @property
    def steps(self) -> int:
        """Number of batches so far."""
        return len(self._banks[0].starts) - 1

    @property
    def touched(self) -> list[int]:
        """Number of rows used so far, for each bank."""
        return [bank.rows.hashed_rows for bank in self._banks]

    @property
    def used(self) -> np.ndarray:
        """[banks, batches]: number of distinct rows in each batch."""
        return np.array([np.diff(bank.starts) for bank in self._banks])

    def add(self, sparse: Sparse) -> None:
        """Add a batch."""
        ids = capture(sparse, self.schema.features, copy=False)
        for number, bank in enumerate(self._banks):
            positions = positions_of(ids, self.schema, number)
            self.ids += positions.count
            bank.add(positions)

    def narrowed(self) -> Schema:
        """Return a schema whose tables are the banks with only their touched rows, as iteration numbers them."""
        banks = zip(self.schema.banks, self.touched)
        return Schema.of([Table(f"dim {bank.dim}", max(1, touched), bank.dim) for bank, touched in banks])

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        """Yield every batch's distinct rows as keys for the planner, bank after bank."""
        for number in range(self.steps):
            # Each bank is one table here. A key is the row's number with the table's number in the high bits.
            yield [bank.read(number).astype(np.int64) | i << ROW_BITS for i, bank in enumerate(self._banks)]

    def __enter__(self) -> "Survey":
        return self

    def __exit__(self, *_: object) -> None:
        for bank in self._banks:
            bank.file.close()  # which deletes it


class _Bank:
    def __init__(self, schema: Schema, bank: int) -> None:
        self.rows = RowStates(
            schema, schema.banks[bank].tables, room=0
        )  # nothing is released: handles are 0, 1, 2, ...
        self.starts = [0]
        self.file = tempfile.TemporaryFile(prefix="skirl-survey-")  # noqa: SIM115 closed with the survey
        self._finder = Finder(schema, bank)

    def add(self, ids: BankIds) -> None:
        distinct = self._finder.find(ids)
        numbers = np.empty(distinct.total, np.int32)
        self.rows.name(self._finder.tables, distinct.found, distinct.low, distinct.first, numbers)
        self.file.seek(0, 2)
        self.file.write(numbers.data)
        self.starts.append(self.starts[-1] + len(numbers))

    def read(self, number: int) -> np.ndarray:
        part = np.empty(self.starts[number + 1] - self.starts[number], np.int32)
        self.file.seek(self.starts[number] * 4)
        if self.file.readinto(part.data) != part.nbytes:
            raise OSError(f"the survey's file is truncated at batch {number}: is the temporary folder full?")
        return part
