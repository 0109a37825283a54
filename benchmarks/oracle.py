"""Claim: the oracle plans tens of millions of ids a second ("Oracle" in docs/performance.md); no row moves.

Slots, grouping and all hazards are included. With --trainers, that many owners, each planning its part of the
rows with its part of the slots, are compared with one planner of all; messages between them are written and read as in
production.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from common import main, result
from skirl.core.ids import BankIds
from skirl.core.keys import MAX_ROWS
from skirl.core.placement import Placement
from skirl.core.tables import Schema, Table
from skirl.data.synthetic import Synthetic
from skirl.oracle.bank import BankPlanner
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner, bank_planners
from skirl.oracle.route import Joined, SharedRoute
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from skirl.tools.machine import peak_bytes


@dataclass
class Oracle:
    """Time of the planner, in ids per second."""

    batch: int = 16_384
    """Samples in a batch, each with one id per table."""
    depth: int = 200
    """Batches in the window."""
    ids: Literal["rows", "hashed64"] = "rows"
    """rows: rows of tables of the data set's size; hashed64: the same ids, hashed into tables of 2**48 rows each."""
    cache: int = 500_000
    """Slots in the cache."""
    steps: int = 50
    """Batches to time."""
    trainers: int = 1
    """If more than 1: compare that many owners with one planner of all rows."""

    def run(self) -> dict[str, Any]:
        """Fill the window, then time batch after batch."""
        torch.set_num_threads(1)  # torch makes the batches; its idle threads would spin on the planner's cores
        data = Synthetic("criteo-kaggle", batch_size=self.batch, batches=self.depth + self.steps)
        rows = {"rows": lambda table: table.rows, "hashed64": lambda table: MAX_ROWS}[self.ids]
        schema = Schema.of([Table(table.name, rows(table), 16) for table in data.tables(16)])
        figures = self._alone(schema, data) if self.trainers == 1 else self._divided(schema, data)
        return result("oracle", self, "batch depth ids cache steps trainers", tables=len(schema.tables), **figures)

    def _alone(self, schema: Schema, data: Synthetic) -> dict[str, Any]:
        planner = BankPlanner(schema, 0, self.cache, depth=self.depth, seen=Seen(schema))
        took, ids = 0.0, 0
        for number, positions in enumerate(self._positions(data)):
            began = time.perf_counter()
            planner.enter(positions)
            if number + 1 < self.depth:
                continue
            planner.executed(planner.plan().number)
            if number >= self.depth:  # before the first batch was planned, the whole window was entered
                took += time.perf_counter() - began
                ids += positions.count
        return {
            "ids_per_s": ids / took,
            "ms_per_batch": took / self.steps * 1e3,
            "peak_rss_mb": peak_bytes() / (1 << 20),
        }

    def _divided(self, schema: Schema, data: Synthetic) -> dict[str, Any]:
        plan, ranks = Plan(self.depth, ramp=False), self.trainers
        one: Planner[None] = Planner(bank_planners(schema, [self.cache], plan, Seen(schema)), plan)
        owners = [Owner(schema, rank, ranks, max(1, self.cache // ranks), plan) for rank in range(ranks)]
        alone, each, moved = Timed(), [Timed() for _ in owners], {"one": 0, "owners": 0}

        def planned() -> None:
            for _, (step,) in iter(lambda: alone(one.next), None):
                moved["one"] += step.fetches
                one.executed(step.number)
            for timed, owner in zip(each, owners, strict=True):
                for _, step in iter(lambda timed=timed, owner=owner: timed(owner.next), None):
                    moved["owners"] += step.fetches

        for number, batch in enumerate(self._positions(data)):
            for timed in (alone, *each):
                timed.counts = number >= self.depth
            one.add(None, [batch], 0)
            parts = zip(each, owners, parts_of(batch, ranks), strict=True)
            letters = [timed(owner.ask, part) for timed, owner, part in parts]
            for timed, owner, given in zip(each, owners, zip(*letters, strict=True), strict=True):
                answer: Joined = timed(owner.together.answer, given)
                timed(owner.add, answer)
            planned()
        for timed in (alone, *each):
            timed.counts = False
        for planner in (one, *owners):
            planner.end()
        planned()
        busiest = max(timed.ms for timed in each)
        return {
            "fetched": moved,
            "fetches_vs_one": round(moved["owners"] / moved["one"], 4) if moved["one"] else None,
            "cpu_vs_one": round(busiest / alone.ms, 4),
        }

    def _positions(self, data: Synthetic) -> Iterator[BankIds]:
        """Yield each batch's ids, in the order of features."""
        tables = np.arange(len(data.rows))
        parts = np.stack([tables, tables * self.batch, (tables + 1) * self.batch, 0 * tables], axis=1)
        for batch in data:
            values = batch.sparse.values().numpy()
            if self.ids == "hashed64":
                values = hashed(values.astype(np.uint64) | np.repeat(tables.astype(np.uint64) << 48, self.batch))
            yield BankIds(values, parts)


class Timed:
    """CPU time of one rank's work. Counts only while `counts` is true."""

    counts = False
    ms = 0.0

    def __call__(self, call: Any, *args: Any) -> Any:
        """Call, add the CPU time, and return the result."""
        began = time.thread_time()
        out = call(*args)
        self.ms += (time.thread_time() - began) * 1e3 if self.counts else 0.0
        return out


class Owner:
    """One of several owners that take turns planning in one thread; the caller passes messages between them."""

    def __init__(self, schema: Schema, rank: int, ranks: int, capacity: int, plan: Plan) -> None:
        self.together = SharedRoute([(schema, {})], rank, Placement.even(ranks), lambda given: [])
        self._plan = plan
        self._planner: Planner[Joined] = Planner(bank_planners(schema, [capacity], plan, Seen(schema)), plan)
        self._planner.due = 0
        self.end = self._planner.end

    def ask(self, part: BankIds) -> Sequence[np.ndarray]:
        """Return what it asks of each owner for its part of the next batch, with its vote on the window."""
        return self.together.ask([part], self._planner.vote())

    def add(self, batch: Joined) -> None:
        """Add a batch after its exchange."""
        self.together.decide(self._plan, batch)
        self._planner.due = self.together.due
        self._planner.add(batch, batch.banks, 0)

    def next(self) -> tuple[Joined, Step] | None:
        """Return the next batch and its Step. None if it is not due yet, or if all are planned."""
        if (planned := self._planner.next()) is None:
            return None
        self.together.step_planned()
        joined, (step,) = planned
        self._planner.executed(step.number)
        return joined, step


def parts_of(batch: BankIds, ranks: int) -> list[BankIds]:
    """Split a batch's ids by rank: each part into equal contiguous stretches."""
    begin, length, out = batch.parts[:, 1], batch.parts[:, 2] - batch.parts[:, 1], []
    for rank in range(ranks):
        mine = batch.parts.copy()
        mine[:, 1], mine[:, 2] = begin + length * rank // ranks, begin + length * (rank + 1) // ranks
        out.append(BankIds(batch.values, mine))
    return out


def hashed(ids: np.ndarray) -> np.ndarray:
    """Return ids hashed to 48 bits, by the mixing of splitmix64."""
    ids = (ids ^ (ids >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    ids = (ids ^ (ids >> 27)) * np.uint64(0x94D049BB133111EB)
    return ((ids ^ (ids >> 31)) & np.uint64(MAX_ROWS - 1)).astype(np.int64)


if __name__ == "__main__":
    main(Oracle)
