"""One pass over the ids of a run: which rows each batch uses, how often, and how many are new.

Rows are numbered in order of first use. Each batch's distinct rows are kept in a file, 4 bytes each.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.ids import capture, positions_of
from skirl.core.positions import Positions
from skirl.core.tables import ROW_BITS, Schema, Table
from skirl.oracle.distinct import Finder
from skirl.oracle.row_states import RowStates
from skirl.tools.jit import kernel

WINDOWS = (1, 10, 50, 200)
"""Numbers of consecutive batches whose distinct rows are counted."""
SHARES = (0.01, 0.1)
"""Shares of the rows, hottest first, whose accesses are counted."""


@dataclass(frozen=True)
class TableUse:
    """A run's use of one table."""

    name: str
    rows: int
    touched: int
    accesses: int
    hottest: dict[str, float]
    """Share of the accesses that the hottest 1% and 10% of the touched rows take."""


class Survey:
    """The rows that a run uses. The caller adds every batch and closes the survey at the end.

    **Arguments**

    - `schema`: the tables.

    >>> import skirl, torch
    >>> with Survey(Schema.of([Table("a", 100, 4)])) as survey:
    ...     for ids in ([[7], [7], [9]], [[9], [3], [3]]):
    ...         survey.add(skirl.KeyedJagged.one_hot(["a"], torch.tensor(ids)))
    ...     [batch[0].tolist() for batch in survey.batches()], survey.touched
    ([[0, 1], [1, 2]], [3])
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.ids = 0
        """Number of ids that are looked up."""
        self._banks = [_Bank(schema, bank) for bank in range(len(schema.banks))]

    @property
    def steps(self) -> int:
        """Number of batches so far."""
        return len(self._banks[0].new)

    @property
    def touched(self) -> list[int]:
        """Number of rows used so far, for each bank."""
        return [bank.touched for bank in self._banks]

    @property
    def new(self) -> np.ndarray:
        """For each batch, the number of rows that no earlier batch used."""
        return np.sum([bank.new for bank in self._banks], axis=0)

    @property
    def used(self) -> np.ndarray:
        """[banks, batches]: number of distinct rows in each batch."""
        return np.array([np.diff(bank.starts) for bank in self._banks])

    def add(self, sparse: Sparse) -> None:
        """Add a batch."""
        captured = capture(sparse, self.schema.features, copy=False)
        for number, bank in enumerate(self._banks):
            positions = positions_of(captured, self.schema, number)
            self.ids += len(positions)
            bank.add(positions)

    def narrowed(self) -> Schema:
        """Return a schema whose tables are the banks with only their touched rows, as `batches` numbers them."""
        return Schema.of(
            [Table(f"dim {bank.dim}", max(1, self.touched[i]), bank.dim) for i, bank in enumerate(self.schema.banks)]
        )

    def batches(self) -> "BatchKeys":
        """Return every batch's distinct rows by number, bank after bank. It can be iterated several times."""
        return BatchKeys(self._banks)

    def tables(self) -> list[TableUse]:
        """Return how the run uses each table."""
        uses: dict[int, TableUse] = {}
        for bank in self._banks:
            table_of = bank.rows.key[: bank.touched] >> ROW_BITS
            for i in bank.tables:
                counts = bank.counts[: bank.touched][table_of == i]
                table = self.schema.tables[i]
                uses[i] = TableUse(table.name, table.rows, len(counts), int(counts.sum()), hottest(counts))
        return [uses[i] for i in sorted(uses)]

    def hottest(self) -> dict[str, float]:
        """Return the share of all accesses that the hottest 1% and 10% of all touched rows take."""
        return hottest(np.concatenate([bank.counts[: bank.touched] for bank in self._banks]))

    def working_set(self, windows: Sequence[int] = WINDOWS) -> dict[int, float]:
        """Return the average number of distinct rows in windows of consecutive batches, which do not overlap."""
        sizes = {}
        for window in windows:
            whole = self.steps // window
            if whole:
                sizes[window] = sum(_distinct(bank, window, whole) for bank in self._banks) / whole
        return sizes

    def close(self) -> None:
        """Close the files, which deletes them."""
        for bank in self._banks:
            bank.file.close()

    def __enter__(self) -> "Survey":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BatchKeys:
    """The batches of a survey as keys for the planner."""

    def __init__(self, banks: "list[_Bank]") -> None:
        self._banks = banks

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        for number in range(len(self._banks[0].new)):
            # Each bank is one table here. A key is the row's number with the table's number in the high bits.
            yield [bank.read(number).astype(np.int64) | i << ROW_BITS for i, bank in enumerate(self._banks)]


class _Bank:
    def __init__(self, schema: Schema, bank: int) -> None:
        self.tables = schema.banks[bank].tables
        self.rows = RowStates(schema, self.tables, room=0)  # nothing is ever released, so handles are 0, 1, 2, ...
        self.counts = np.zeros(1024, np.int64)
        self.touched = 0
        self.new: list[int] = []
        self.starts = [0]
        self.file = tempfile.TemporaryFile(prefix="skirl-survey-")  # noqa: SIM115 closed with the survey
        self._finder = Finder(schema, bank)

    def add(self, positions: Positions) -> None:
        layout, distinct = self._finder.find_all(positions)
        first = distinct.first
        numbers = np.empty(int(first[-1]), np.int32)
        self.rows.name(self._finder.tables, distinct.found, distinct.low, first, numbers)
        before, self.touched = self.touched, self.rows.hashed_rows
        if self.touched > len(self.counts):
            self.counts = np.concatenate(
                [self.counts, np.zeros(max(self.touched, len(self.counts)) - len(self.counts) + self.touched, np.int64)]
            )
        _tally(layout.parts, layout.first, distinct.row_of, first, numbers, self.counts)
        self.new.append(self.touched - before)
        self.file.seek(0, 2)
        self.file.write(numbers.data)
        self.starts.append(self.starts[-1] + len(numbers))

    def read(self, number: int) -> np.ndarray:
        part = np.empty(self.starts[number + 1] - self.starts[number], np.int32)
        self.file.seek(self.starts[number] * 4)
        if self.file.readinto(part.data) != part.nbytes:
            raise OSError(f"the survey's file is truncated at batch {number}: is the temporary folder full?")
        return part


def hottest(counts: np.ndarray) -> dict[str, float]:
    """Return the share of accesses that the hottest 1% and 10% of rows take.

    >>> hottest(np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 91]))
    {'1%': 0.91, '10%': 0.91}
    """
    total = int(counts.sum())
    if not total:
        return {f"{share:.0%}": 0.0 for share in SHARES}
    descending = np.sort(counts)[::-1]
    return {f"{share:.0%}": float(descending[: max(1, round(share * len(counts)))].sum() / total) for share in SHARES}


def _distinct(bank: _Bank, window: int, whole: int) -> int:
    """Return the sum over the first `whole` windows of the distinct rows in each."""
    last = np.full(bank.touched, -1, np.int32)
    total = 0
    for number in range(window * whole):
        part = bank.read(number)
        mine = number // window
        total += int(np.count_nonzero(last[part] != mine))
        last[part] = mine
    return total


@kernel
def _tally(parts, first_part, row_of, first, numbers, counts):
    """Count every access."""
    for t in range(len(first) - 1):
        for part in range(first_part[t], first_part[t + 1]):
            begin = parts[part, 3]
            for p in range(begin, begin + parts[part, 1] - parts[part, 0]):
                counts[numbers[first[t] + row_of[p]]] += 1
