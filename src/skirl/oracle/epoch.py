"""The future of a whole epoch: a first pass spools which rows each batch uses, a backward scan finds every next use."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from skirl.core.ids import BankIds
from skirl.core.keys import key_of
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.distinct import Finder
from skirl.oracle.loops import NEVER
from skirl.oracle.planner import Batch, Plan, Planner, bank_planners
from skirl.oracle.row_states import MOST_IN_ARRAY, RowStates
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from skirl.tools.jit import kernel
from skirl.tools.os_errors import NotWritten, why


class Epoch:
    """The next uses in a whole epoch, of each batch's distinct rows by last position. Its file has the rows of each batch
    as handles, bank after bank; after the scan, their next uses take the same places."""

    def __init__(self, schemas: Sequence[Schema]) -> None:
        banks = [(schema, bank) for schema in schemas for bank in range(len(schema.banks))]
        self._finders = [Finder(schema, bank) for schema, bank in banks]
        # Here, a row's state is 1 plus the number of the next batch that uses it, as the scan has seen so far; 0: none.
        self._rows = [RowStates(schema, schema.banks[bank].tables, MOST_IN_ARRAY) for schema, bank in banks]
        self._starts = [0]
        """Where the rows of each batch and bank begin in the file."""
        self.file: Any = tempfile.TemporaryFile(prefix="skirl-spool-")  # noqa: SIM115 closed with the epoch

    def add(self, batch: Sequence[Batch]) -> None:
        with _spooling():
            for bank, (finder, part) in enumerate(zip(self._finders, batch, strict=True)):
                distinct = finder.find(BankIds.of(part))
                parts = zip(finder.tables, distinct.low, np.diff(distinct.first))
                keys = np.concatenate([key_of(table, distinct.found[low : low + rows]) for table, low, rows in parts])
                self.file.write(self._handles(bank, keys).data)
                self._starts.append(self._starts[-1] + len(keys))

    def scan(self) -> None:
        with _spooling():
            for place in range(len(self._starts) - 2, -1, -1):
                number, bank = divmod(place, len(self._rows))
                part = self._read(place)
                _scan(part, self._rows[bank].dense, self._rows[bank].hashed, number)
                self.file.seek(self._starts[place] * 4)
                self.file.write(part.data)
            self.file.flush()

    def first_uses(self, bank: int, keys: np.ndarray) -> np.ndarray:
        """Return the first batch that uses each row resident at the start. Call this before the second pass begins."""
        rows, handles = self._rows[bank], self._handles(bank, keys)
        states, hashed = np.empty(len(keys), np.int32), handles < 0
        states[hashed] = rows.hashed[-1 - handles[hashed]]
        states[~hashed] = rows.dense[handles[~hashed]]
        return np.where(states > 0, states - 1, NEVER).astype(np.int32)

    def next_uses(self, number: int) -> list[np.ndarray]:
        """Return, by bank, the next uses of the rows of a batch."""
        self._rows.clear()  # the file knows the rest
        return [self._read(number * len(self._finders) + bank) for bank in range(len(self._finders))]

    def close(self) -> None:
        with suppress(OSError):  # what is still buffered may find the disk full
            self.file.close()

    def _handles(self, bank: int, keys: np.ndarray) -> np.ndarray:
        """Return handles. Those of hashed rows are given as -1 - handle."""
        rows = self._rows[bank]
        handles = rows.handles(keys)
        return np.where(rows.base[keys >> ROW_BITS] >= 0, handles, -1 - handles) if rows.any_hashed else handles

    def _read(self, place: int) -> np.ndarray:
        self.file.seek(self._starts[place] * 4)
        part = np.empty(self._starts[place + 1] - self._starts[place], np.int32)
        if self.file.readinto(part.data) != part.nbytes:
            number = place // len(self._finders)
            raise OSError(f"the spool of the epoch is truncated at batch {number}: is the temporary folder full?")
        return part


def planned(
    schema: Schema,
    batches: Iterable[Sequence[np.ndarray]],
    capacities: Sequence[int],
    plan: Plan,
    *,
    hold_rows: Sequence[int] | None = None,
) -> Iterator[list[Step]]:
    """Yield the Steps of a run over batches of keys, one for each bank, from an empty cache and an empty store: what a
    run would move. The window's limit in bytes counts only the keys. `hold_rows`: evicted rows of each bank that can be
    forwarded at any moment; it turns fetches from the store into forwards and changes no other count."""
    with closing(Epoch([schema])) if plan.depth == "epoch" else nullcontext() as epoch:
        if epoch is not None:
            if iter(batches) is batches:
                raise ValueError('depth="epoch" reads the batches twice, and this is an iterator: pass a list')
            for keys in batches:
                epoch.add(keys)
            epoch.scan()
        banks = bank_planners(schema, capacities, plan, Seen(schema), hold_rows=hold_rows)
        planner = Planner[None](banks, plan, next_uses=None if epoch is None else epoch.next_uses)
        for keys in batches:
            planner.add(None, keys, sum(part.nbytes for part in keys))
            yield from _ready(planner)
        planner.end()
        yield from _ready(planner)


def _ready(planner: Planner[None]) -> Iterator[list[Step]]:
    while (planned := planner.next()) is not None:
        planner.executed(planned[1][0].number)
        yield planned[1]


@contextmanager
def _spooling() -> Iterator[None]:
    """Write the spool in this block. Raise `NotWritten` if there is no room for it: then no plan can be made."""
    try:
        yield
    except OSError as error:
        place = tempfile.gettempdir()
        raise NotWritten(
            f'depth="epoch" writes which rows each batch uses to a temporary file, and {place} could not take it, '
            f"{why(error)}: set TMPDIR to a folder with room, or use depth='auto'",
            error.errno,
        ) from error


@kernel
def _scan(part, dense, hashed, number):
    for i in range(len(part)):
        handle = part[i]
        if handle >= 0:
            following = dense[handle]
            dense[handle] = number + 1
        else:
            following = hashed[-1 - handle]
            hashed[-1 - handle] = number + 1
        part[i] = following - 1 if following > 0 else NEVER
