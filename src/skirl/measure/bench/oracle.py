"""Planning speed of the oracle in ids per second, including slots, grouping and all hazards; no row moves."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.measure.bench.helpers import at_least_one, check_trace, read_trace, result
from skirl.tools.machine import peak_bytes

if TYPE_CHECKING:
    from skirl.core.positions import Positions
    from skirl.core.tables import Table
    from skirl.data.synthetic import Synthetic


@dataclass
class Oracle:
    """Flags of `skirl bench oracle`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "owners": ("trainers", "trace"),
        "output": ("json",),
    }

    batch: int = 16_384
    """Samples in a batch, each with one id per table."""
    depth: int = 200
    """Batches in the window."""
    threads: int = 1
    """Threads that plan."""
    ids: Literal["rows", "hashed64"] = "rows"
    """rows: rows of tables of the data set's size; hashed64: the same ids, hashed into tables of 2**48 rows each."""
    data: str = "criteo-kaggle"
    """The data set whose table sizes to use: criteo-kaggle, avazu or criteo-terabyte."""
    cache: int = 500_000
    """Slots in the cache."""
    steps: int = 50
    """Batches to time."""
    seed: int = 0
    trainers: int = 1
    """If more than 1: compare that many owners, each planning its part of the rows with its part of the slots, with one
    planner of all rows."""
    trace: Path | None = None
    """With --trainers: a .npy file of ids in order of access, as for `skirl bench traffic`, to use instead of synthetic
    ids."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        at_least_one(self, "batch", "depth", "threads", "cache", "steps", "trainers")
        if self.trainers > 1 and self.threads > 1:
            raise ValueError(f"threads is {self.threads}: set it to 1, since trainers is {self.trainers}")
        if self.trace is not None:
            if self.trainers == 1:
                raise ValueError(
                    "trace is given for one planner: set trainers to 2 or more, or use `skirl bench traffic`"
                )
            check_trace(self.trace)

    def run(self) -> dict[str, Any]:
        """Fill the window, then time batch after batch."""
        import torch

        from skirl.core.tables import Schema, Table
        from skirl.data.synthetic import Synthetic
        from skirl.oracle.bank import BankPlanner
        from skirl.oracle.seen import Seen

        if self.trainers > 1:
            return self._divided()
        torch.set_num_threads(1)  # torch makes the batches; its idle threads would spin on the planner's cores
        data = Synthetic(self.data, batch_size=self.batch, batches=self.depth + self.steps, seed=self.seed)
        schema = Schema.of([Table(t.name, self._rows(t), 16) for t in data.tables(16)])
        planner = BankPlanner(schema, 0, self.cache, depth=self.depth, seen=Seen(schema), threads=self.threads)
        times, ids, moved = [], 0, {"fetched": 0, "new": 0, "evicted": 0}
        for number, positions in enumerate(self._positions(data)):
            began = time.perf_counter()
            planner.enter(positions)
            entered = time.perf_counter()
            if number + 1 < self.depth:
                continue
            step = planner.plan()
            planned = time.perf_counter()
            planner.executed(step.number)
            if number >= self.depth:  # before the first batch was planned, the whole window was entered
                times.append((entered - began, planned - entered))
                ids += len(positions)
                moved["fetched"] += step.fetches
                moved["new"] += len(step.new_keys)
                moved["evicted"] += len(step.evict_keys)
        enter, plan = np.array(times).T * 1e3
        both = enter + plan
        return result(
            "oracle",
            self,
            "batch depth threads ids cache steps",
            tables=len(schema.tables),
            ids_per_s=ids / (both.sum() / 1e3),
            ids_per_s_best_batch=ids / self.steps / (both.min() / 1e3),
            ms_per_batch=float(both.mean()),
            enter_ms=float(enter.mean()),
            plan_ms=float(plan.mean()),
            median_ms=float(np.median(both)),
            window_rows=planner.window_rows,
            rows_a_batch={name: n / self.steps for name, n in moved.items()},
            peak_rss_mb=peak_bytes() / (1 << 20),
        )

    def _divided(self) -> dict[str, Any]:
        """Plan the same batches by several owners and by one planner, and return the comparison."""
        import torch

        from skirl.core.positions import Positions
        from skirl.core.tables import Schema, Table
        from skirl.data.synthetic import Synthetic
        from skirl.measure.bench.owners import divided
        from skirl.oracle.options import Plan

        torch.set_num_threads(1)
        if self.trace is not None:
            distinct, rows = np.unique(read_trace(self.trace), return_inverse=True)
            batches = rows[: len(rows) // self.batch * self.batch].reshape(-1, self.batch)
            if len(batches) <= self.depth:
                raise ValueError(
                    f"depth is {self.depth}, the trace has {len(batches)} batches of {self.batch}: set either to less"
                )
            schema, stream = Schema.of([Table("id", len(distinct), 16)]), map(Positions.of, batches)
        else:
            data = Synthetic(self.data, batch_size=self.batch, batches=self.depth + self.steps, seed=self.seed)
            schema = Schema.of([Table(t.name, self._rows(t), 16) for t in data.tables(16)])
            stream = self._positions(data)
        plan = Plan(self.depth, ramp=False)
        figures = divided(schema, stream, ranks=self.trainers, capacity=self.cache, plan=plan, warm=self.depth)
        flags = "batch depth ids data cache steps trainers" if self.trace is None else "batch depth cache trainers"
        return result(
            "oracle",
            self,
            flags,
            trace=None if self.trace is None else self.trace.name,
            tables=len(schema.tables),
            **figures,
        )

    def _rows(self, table: "Table") -> int:
        return MAX_ROWS if self.ids == "hashed64" else table.rows

    def _positions(self, data: "Synthetic") -> "Iterator[Positions]":
        """Yield each batch's ids, in the order of features."""
        from skirl.core.positions import Positions
        from skirl.measure.bench.loops import hash_rows

        tables = np.arange(len(data.tables(16)))
        for batch in data:
            values = batch.sparse.values().numpy()
            begin = tables * self.batch
            if self.ids == "hashed64":
                values = values.copy()
                hash_rows(values, self.batch)
            yield Positions(values, np.stack([tables, begin, begin + self.batch, 0 * tables], axis=1))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        if self.trainers > 1:
            return _summary(result)
        moved = result["rows_a_batch"]
        return {
            "planned": f"{result['ids_per_s'] / 1e6:.1f}M ids/s, {result['ms_per_batch']:.2f} ms a batch of "
            f"{result['batch']:,} x {result['tables']} (enter {result['enter_ms']:.2f}, plan {result['plan_ms']:.2f}, "
            f"median {result['median_ms']:.2f})",
            "window": f"{result['depth']} batches, {result['window_rows']:,} distinct rows; cache {result['cache']:,}",
            "rows a batch": ", ".join(f"{n:,.0f} {name}" for name, n in moved.items()),
            "peak": f"{result['peak_rss_mb']:,.0f} MB, the whole process",
        }


def _summary(result: dict[str, Any]) -> dict[str, str]:
    cpu, fetched = result["cpu_ms"], result["fetched"]
    parts = {name: ms for name, ms in cpu.items() if name != "one"}
    return {
        "batches": f"{result['batches']:,} of {result['batch']:,}, depth {result['depth']}, {result['cache']:,} slots",
        "fetches": f"{fetched['owners']:,} of {result['trainers']} owners, {fetched['one']:,} of one planner: "
        f"{result['fetches_vs_one']} times",
        "CPU": f"{sum(parts.values()):.2f} ms a batch of the busiest rank ("
        + ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        + f"), {cpu['one']:.2f} of one planner: {result['cpu_vs_one']} times",
        "ids": f"{result['id_bytes_a_row']} bytes for each of {result['rows_a_trainer']:,.0f} rows of a trainer",
    }
