"""Claim: the oracle plans tens of millions of ids a second ("Oracle" in docs/performance.md); no row moves.

Slots, grouping and all hazards are included. With --trainers, that many owners, each planning its part of the
rows with its part of the slots, are compared with one planner of all; messages between them are written and read as in
production.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from common import Bench, Stopwatch, main, result
from skirl.core.ids import BankIds
from skirl.core.keys import MAX_ROWS
from skirl.core.placement import Placement
from skirl.core.tables import Schema, Table
from skirl.data.synthetic import Synthetic
from skirl.oracle.bank import BankPlanner
from skirl.oracle.planner import Plan, Planner, bank_planners
from skirl.oracle.seen import Seen
from skirl.tools.machine import peak_bytes
from tests.oracle.trainers import Owner


@dataclass(frozen=True)
class Oracle(Bench):
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
        torch.set_num_threads(1)  # torch makes the batches; its idle threads would spin on the planner's cores
        data = Synthetic("criteo-kaggle", batch_size=self.batch, batches=self.depth + self.steps)
        rows = {"rows": lambda table: table.rows, "hashed64": lambda table: MAX_ROWS}[self.ids]
        schema = Schema.of([Table(table.name, rows(table), 16) for table in data.tables(16)])
        figures = self._alone(schema, data) if self.trainers == 1 else self._divided(schema, data)
        return result("oracle", self, "batch depth ids cache steps trainers", tables=len(schema.tables), **figures)

    def _alone(self, schema: Schema, data: Synthetic) -> dict[str, Any]:
        planner = BankPlanner(schema, 0, self.cache, depth=self.depth, seen=Seen(schema))
        watch, ids = Stopwatch(), 0
        for number, positions in enumerate(self._positions(data)):
            if number >= self.depth:  # before the first batch was planned, the whole window was entered
                ids += positions.count
            else:
                watch = Stopwatch()
            with watch:
                planner.enter(positions)
                if number + 1 >= self.depth:
                    planner.executed(planner.plan().number)
        return {
            "ids_per_s": ids / watch.seconds,
            "ms_per_batch": watch.seconds / self.steps * 1e3,
            "peak_rss_mb": peak_bytes() / (1 << 20),
        }

    def _divided(self, schema: Schema, data: Synthetic) -> dict[str, Any]:
        plan, ranks = Plan(self.depth, ramp=False), self.trainers
        one: Planner[None] = Planner(bank_planners(schema, [self.cache], plan, Seen(schema)), plan)
        share, even = [max(1, self.cache // ranks)], Placement.even(ranks)
        owners: list[Owner[None]] = [Owner(schema, rank, even, share, plan) for rank in range(ranks)]
        alone, *each = [Stopwatch() for _ in range(1 + ranks)]
        moved = {"one": 0, "owners": 0}

        def plan_all(name: str, planner: Planner[Any], following: Callable[[], Any], watch: Stopwatch) -> None:
            while True:
                with watch:
                    if (found := following()) is None:
                        return
                    *_, (step,) = found
                    planner.executed(step.number)
                moved[name] += step.fetches

        def planned() -> None:
            plan_all("one", one, one.next, alone)
            for owner, watch in zip(owners, each, strict=True):
                plan_all("owners", owner.planner, owner.next, watch)

        parts = [self._positions(data.sharded(rank, rank + 1, ranks)) for rank in range(ranks)]
        for number, batches in enumerate(zip(self._positions(data), *parts, strict=True)):
            if number == self.depth:  # the window is full
                for watch in (alone, *each):
                    watch.cpu = 0.0
            with alone:
                one.add(None, [batches[0]], 0)
            letters = []
            for owner, watch, part in zip(owners, each, batches[1:], strict=True):
                with watch:
                    letters.append(owner.together.ask([part], owner.planner.vote()))
            for owner, watch, given in zip(owners, each, zip(*letters, strict=True), strict=True):
                with watch:
                    answer = owner.together.answer(given)
                    assert answer is not None
                    owner.add(None, answer, 0)
            planned()
        cpu_vs_one = round(max(watch.cpu for watch in each) / alone.cpu, 4)
        for planner in (one, *(owner.planner for owner in owners)):
            planner.end()
        planned()
        return {
            "fetches_vs_one": round(moved["owners"] / moved["one"], 4) if moved["one"] else None,
            "cpu_vs_one": cpu_vs_one,
        }

    def _positions(self, data: Synthetic) -> Iterator[BankIds]:
        """Yield each batch's ids, in the order of features."""
        tables = np.arange(len(data.rows))
        for batch in data:
            values, count = batch.sparse.values().numpy(), len(batch.labels)
            parts = np.stack([tables, tables * count, (tables + 1) * count, 0 * tables], axis=1)
            if self.ids == "hashed64":
                values = hashed(values.astype(np.uint64) | np.repeat(tables.astype(np.uint64) << 48, count))
            yield BankIds(values, parts)


def hashed(ids: np.ndarray) -> np.ndarray:
    """Return ids hashed to 48 bits, by the mixing of splitmix64."""
    ids = (ids ^ (ids >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    ids = (ids ^ (ids >> 27)) * np.uint64(0x94D049BB133111EB)
    return ((ids ^ (ids >> 31)) & np.uint64(MAX_ROWS - 1)).astype(np.int64)


if __name__ == "__main__":
    main(Oracle)
