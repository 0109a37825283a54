"""Record of the rows that each planned step moves, from which any placement's load at any site can be counted exactly.

A placement does not change the Steps: the code that trains plans them. They are kept in a file, 8 bytes per row.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.id_hash import hashes_of
from skirl.core.ids import capture
from skirl.core.keys import table_of
from skirl.core.placement import Placement
from skirl.engine.engine import Engine
from skirl.engine.work import Flight, Item
from skirl.oracle.options import Plan
from skirl.pipeline.batch_copy import weigh
from skirl.pipeline.epoch import Epoch
from skirl.pipeline.window import Window


class Moves(NamedTuple):
    """The keys that move in one step, one array per bank."""

    read: list[np.ndarray]
    """Rows that are read from the store."""
    written: list[np.ndarray]
    """Rows that leave the cache."""
    new: list[np.ndarray]
    """Rows that are used for the first time."""


@dataclass(frozen=True)
class Scored:
    """The loads that a placement puts on each site in some steps."""

    rows_read: np.ndarray
    """int64 [steps, sites], like the three below."""
    rows_written: np.ndarray
    bytes_read: np.ndarray
    bytes_written: np.ndarray
    held: np.ndarray
    """int64 [sites]: bytes of the rows that the run uses at all."""

    @property
    def busiest(self) -> np.ndarray:
        """Bytes of each site in its busier direction, over all steps."""
        return np.maximum(self.bytes_read.sum(axis=0), self.bytes_written.sum(axis=0))

    @property
    def imbalance(self) -> float:
        """Bytes that the busiest site reads and writes, over the mean of all sites."""
        total = (self.bytes_read + self.bytes_written).sum(axis=0)
        return float(total.max() / total.mean()) if total.any() else 1.0

    def seconds(self, rates: Sequence[float]) -> float:
        """Return how long the busiest site takes to move its rows.

        **Arguments**

        - `rates`: bytes per second of each site, in each direction.
        """
        return float((self.busiest / np.asarray(rates)).max())


class Loads:
    """The moves of a run. The caller has to call `close`.

    **Arguments**

    - `tables`: number of tables.
    - `record_bytes`: bytes of a row of each bank, with its optimizer state.
    - `by_table`: the same for each table, for the plan's file; empty, as by default: not known.

    >>> with Loads(1, [8]) as loads:
    ...     loads.add(Moves([np.array([1, 2])], [np.array([3])], [np.array([1, 2, 3])]))
    ...     loads.scored(Placement.even(2, "sites")).bytes_read.sum(), loads.of_tables(slice(None))[1].tolist()
    (np.int64(16), [8])
    """

    def __init__(self, tables: int, record_bytes: Sequence[int], by_table: Sequence[int] = ()) -> None:
        self.tables, self.record_bytes, self.by_table = tables, list(record_bytes), list(by_table)
        self._file = tempfile.TemporaryFile(prefix="skirl-moves-")  # noqa: SIM115 closed with the loads
        self._ends = [0]
        """Where the keys of each part end: for each step those read, written and new, bank after bank."""

    def __len__(self) -> int:
        """Return the number of steps so far."""
        return (len(self._ends) - 1) // (3 * len(self.record_bytes))

    def add(self, moves: Moves) -> None:
        """Append one step.

        **Arguments**

        - `moves`: the keys that move in it.
        """
        self._file.seek(0, 2)
        for keys in (*moves.read, *moves.written, *moves.new):
            self._file.write(np.ascontiguousarray(keys, np.int64).data)
            self._ends.append(self._ends[-1] + len(keys))

    def steps(self, which: slice = slice(None)) -> Iterator[Moves]:
        """Yield the moves of some steps, in order.

        **Arguments**

        - `which`: the steps; all by default.
        """
        banks = len(self.record_bytes)
        for step in range(*which.indices(len(self))):
            each = self._parts(step, range(3 * banks))
            yield Moves(each[:banks], each[banks : 2 * banks], each[2 * banks :])

    def new(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield, bank by bank, the bytes of a row and the keys of rows that the run uses. Each key comes once."""
        banks = len(self.record_bytes)
        for step in range(len(self)):
            yield from zip(self.record_bytes, self._parts(step, range(2 * banks, 3 * banks)), strict=True)

    def _parts(self, step: int, which: range) -> list[np.ndarray]:
        """Return the keys of some consecutive parts of a step."""
        first = step * 3 * len(self.record_bytes)
        ends = np.array(self._ends[first + which.start : first + which.stop + 1])
        self._file.seek(int(ends[0]) * 8)
        keys = np.empty(ends[-1] - ends[0], np.int64)
        if self._file.readinto(keys.data) != keys.nbytes:
            raise OSError(f"the file of moves is cut short at step {step}: is the temporary folder full?")
        return np.split(keys, ends[1:-1] - ends[0])

    def held(self, placement: Placement) -> np.ndarray:
        """Return the bytes that each site holds of the rows that the run uses, int64 [sites].

        **Arguments**

        - `placement`: where rows live.
        """
        held = np.zeros(placement.sites, np.int64)
        for nbytes, keys in self.new():
            held += nbytes * np.bincount(placement.site_of(keys), minlength=placement.sites)
        return held

    def scored(self, placement: Placement, which: slice = slice(None)) -> Scored:
        """Count exactly what each site reads and writes in each step.

        **Arguments**

        - `placement`: where rows live.
        - `which`: the steps; all by default. What sites hold is always counted over the whole run.
        """
        steps, sites = range(*which.indices(len(self))), placement.sites
        each = np.zeros((4, len(steps), sites), np.int64)
        found = Scored(each[0], each[1], each[2], each[3], self.held(placement))
        for at, moves in enumerate(self.steps(which)):
            for nbytes, read, written, _ in zip(self.record_bytes, *moves, strict=True):
                for keys, rows, of in (
                    (read, found.rows_read, found.bytes_read),
                    (written, found.rows_written, found.bytes_written),
                ):
                    counts = np.bincount(placement.site_of(keys), minlength=sites)
                    rows[at] += counts
                    of[at] += counts * nbytes
        return found

    def of_tables(self, which: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each table, the bytes read and written in some steps, and those of its rows that the run uses.

        **Arguments**

        - `which`: the steps.
        """
        read, written, held = np.zeros((3, self.tables), np.int64)
        for moves in self.steps(which):
            for nbytes, *parts in zip(self.record_bytes, moves.read, moves.written, strict=True):
                for keys, into in zip(parts, (read, written), strict=True):
                    into += nbytes * np.bincount(table_of(keys), minlength=self.tables)
        for nbytes, keys in self.new():
            held += nbytes * np.bincount(table_of(keys), minlength=self.tables)
        return read, written, held

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()

    def __enter__(self) -> "Loads":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plan_run(engine: Engine, batches: Iterable[Sparse], plan: Plan) -> Iterator[Moves]:
    """Yield what each step of a run over these batches moves. The code that trains plans it, and no row is moved.

    **Arguments**

    - `engine`: engine of the embeddings that would train: its cache is allocated, its store stays empty.
    - `batches`: the ids of each batch; read twice with depth="epoch".
    - `plan`: how to plan.
    """
    epochs = []
    try:
        if plan.depth == "epoch":
            epochs.append(Epoch(engine.schema))
            for sparse in batches:
                epochs[0].add(engine.resolver.positions(capture(sparse, engine.schema.features)))
            epochs[0].scan()
        window, resident = Window([engine], plan, epochs), _Resident(engine)
        for sparse in batches:
            captured = capture(sparse, engine.schema.features, copy=False)
            captured.hashes = hashes_of(captured)
            window.enter([Item(None, captured, weigh(sparse))])
            yield from _planned(window, resident)
        window.end()
        yield from _planned(window, resident)
    finally:
        for epoch in epochs:
            epoch.close()


def _planned(window: Window, resident: "_Resident") -> Iterator[Moves]:
    while (flight := window.next()) is not None:
        window.executed(flight.number)
        yield resident.moves(flight)


class _Resident:
    """Tracker of the keys in the cache. When the cache is split again, all of them count as written."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._keys: list[np.ndarray] = []

    def moves(self, flight: Flight) -> Moves:
        """Return what a step moves. If the cache is split again before it, that includes writing all resident rows."""
        steps: Sequence[Any] = flight.steps
        split = flight.splits[0] if flight.splits else self._engine.capacity.split
        assert split is not None
        written = [step.evict_keys for step in steps]
        if flight.splits or not self._keys:
            if self._keys:
                written = [np.concatenate([keys[keys >= 0], keys_out]) for keys, keys_out in zip(self._keys, written)]
            self._keys = [np.full(slots, -1, np.int64) for slots in split.slots]
        for keys, step in zip(self._keys, steps, strict=True):
            keys[step.evict_slots] = -1
            for came, slots in (
                (step.fetch_keys, step.fetch_slots),
                (step.forward_keys, step.forward_slots),
                (step.new_keys, step.new_slots),
            ):
                keys[slots] = came
        return Moves([step.fetch_keys for step in steps], written, [step.new_keys for step in steps])
