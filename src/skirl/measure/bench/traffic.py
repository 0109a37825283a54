"""Rows that a cache fetches again on a trace of ids: in an executed run, and under MIN, LRU, LFU and BagPipe's rule.

`benchmarks/traffic_others.py`, which shares no code with skirl, counts `min` and `lru`.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from skirl.core.optim import SGD
from skirl.measure.bench.helpers import Stopwatch, at_least_one, check_trace, read_trace, result

if TYPE_CHECKING:
    from skirl.core.batch import KeyedJagged
    from skirl.core.tables import Table
    from skirl.oracle.options import Plan
    from skirl.pipeline.simulate import Totals

INDEPENDENT = Path(__file__).parents[4] / "benchmarks" / "traffic_others.py"
"""The script that counts independently, in a checkout."""

COUNTS = ("skirl", "min", "lru", "lfu", "ttl")
"""The counts that are reported, by policy."""


@dataclass(frozen=True)
class Traffic:
    """Rows that a cache fetches again on a trace of ids, against MIN, LRU, LFU and BagPipe's rule."""

    trace: Path
    """A .npy file with a one-dimensional array of integer ids, in order of access."""
    batch: int
    """Accesses in a batch; a last, shorter batch is dropped."""
    capacity: int
    """Rows that the cache holds."""
    depth: int | Literal["auto", "epoch"] = "epoch"
    """Batches that the oracle reads ahead: a number, auto, or epoch for the whole trace."""
    policy: Literal["min", "lru", "lfu", "ttl"] = "min"
    """The eviction policy of the executed run."""
    prefetch: int = 2
    """Number of steps ahead that rows are fetched."""
    ramp: bool = False
    """Start with a window of 8 batches that grows, as training does; otherwise read the whole window first."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        check_trace(self.trace)
        at_least_one(self, "batch", "capacity")
        if self.policy not in ("min", "lru", "lfu", "ttl"):
            raise ValueError(f"policy is {self.policy!r}: set it to min, lru, lfu or ttl")
        _ = self.plan  # checks depth and prefetch

    @property
    def plan(self) -> "Plan":
        """The plan of the executed run."""
        from skirl.oracle.options import Plan

        return Plan(self.depth, self.prefetch, self.policy, self.ramp)

    def run(self) -> dict[str, Any]:
        """Execute the trace, count it under all policies, and compare the run with its plan."""
        from skirl.oracle.options import Plan

        ids = read_trace(self.trace)
        if len(ids) < self.batch:
            raise ValueError(
                f"batch is {self.batch}, the trace has {len(ids)} accesses: set batch to {len(ids)} or less"
            )
        ids = ids[: len(ids) // self.batch * self.batch]
        distinct, rows = np.unique(ids, return_inverse=True)
        batches = rows.reshape(-1, self.batch)
        self._check_capacity(batches)
        executed, hold_rows, seconds, stages = self._execute(batches, len(distinct))
        counted = self._count(batches, len(distinct), self.plan, hold_rows)
        if executed != counted:
            raise AssertionError(f"the executed run moved {executed}, its plan says {counted}: this is a bug in skirl")
        counted = independent_counts()
        counts = {
            "skirl": executed.fetched,
            "min": counted and counted.minimum(ids, self.batch, self.capacity),
            "lru": counted and counted.least_recent(ids, self.batch, self.capacity),
            "lfu": self._count(batches, len(distinct), Plan(1, self.prefetch, "lfu")).fetched,
            "ttl": self._count(batches, len(distinct), self._ttl_plan(len(batches))).fetched,
        }
        least = counts["min"]
        return result(
            "traffic",
            self,
            "batch capacity depth policy prefetch ramp",
            trace=self.trace.name,
            batches=len(batches),
            distinct=len(distinct),
            first_uses=executed.new,
            **counts,
            to_min={name: round(n / least, 4) if least and n is not None else None for name, n in counts.items()},
            forwarded=executed.forwarded,
            written=executed.written,
            missing=None
            if counted
            else f"min and lru: {INDEPENDENT.name} was not found; run skirl from a checkout of its repository",
            seconds=round(seconds, 3),
            stages=stages,
        )

    def _check_capacity(self, batches: np.ndarray) -> None:
        needs = [len(np.unique(batch)) for batch in batches]
        worst = int(np.argmax(needs))
        if needs[worst] > self.capacity:
            raise ValueError(
                f"capacity is {self.capacity}, batch {worst} has {needs[worst]} distinct ids: set capacity to "
                f"{needs[worst]} or more, or a smaller batch"
            )

    def _execute(self, batches: np.ndarray, rows: int) -> "tuple[Totals, list[int], float, dict[str, float]]":
        """Train on every batch. Return what moved, the rows that forwarding may hold, the seconds, and where time went."""
        from skirl.nn.collection import EmbeddingBagCollection
        from skirl.pipeline.lookahead import lookahead
        from skirl.pipeline.simulate import Totals

        embeddings = EmbeddingBagCollection([_table(rows)], optimizer=SGD(lr=0.01), cache=self.capacity)
        loader = _Loader(batches)
        plan = self.plan
        ahead = lookahead(
            loader,
            embeddings,
            sparse=lambda ids: ids,
            depth=plan.depth,
            prefetch=plan.prefetch,
            policy=plan.policy,
            ramp=plan.ramp,
        )
        with Stopwatch() as watch, ahead as steps:
            for ids in steps:
                embeddings(ids)["id"].sum().backward()
        engine = embeddings.engine
        counters = engine.counters
        moved = Totals(counters.steps, counters.fetched, counters.forwarded, counters.new, counters.written)
        times = ahead.times.busy | {"stall": ahead.times.stall, "read": ahead.times.read}
        hold_rows = engine.capacity.halves
        embeddings.close()
        return moved, hold_rows, watch.seconds, {name: round(value, 3) for name, value in times.items()}

    def _count(self, batches: np.ndarray, rows: int, plan: "Plan", hold_rows: list[int] | None = None) -> "Totals":
        """Count with the planner alone. The only table is number 0, so a row is its own key."""
        from skirl.core.tables import Schema
        from skirl.pipeline.simulate import simulate

        schema = Schema.of([_table(rows)])
        return simulate(schema, [[batch] for batch in batches], [min(self.capacity, rows)], plan, hold_rows=hold_rows)

    def _ttl_plan(self, batches: int) -> "Plan":
        """Return the plan of BagPipe's rule at the same depth; with epoch, the window holds all batches."""
        from skirl.oracle.options import Plan

        depth = batches if self.depth == "epoch" else self.depth
        return Plan(depth, self.prefetch, "ttl", self.ramp and self.depth != "epoch")

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as text for a reader, by label."""
        facts = {
            "trace": f"{result['batches']:,} batches of {result['batch']:,} accesses, {result['distinct']:,} distinct ids",
            "run": f"capacity {result['capacity']:,}, policy {result['policy']}, depth {result['depth']}: "
            f"{result['first_uses']:,} first uses, {result['written']:,} rows written, {result['seconds']:.1f} s",
            "": "rows brought in again",
        }
        for name in COUNTS:
            count, ratio = result[name], result["to_min"][name]
            facts[name] = "missing" if count is None else f"{count:>12,}"
            if ratio is not None:
                facts[name] += f"{ratio:>8.2f} of min"
        if result["missing"]:
            facts["missing"] = result["missing"]
        return facts


class _Loader:
    """A loader with one sample per access and one id per sample."""

    yields_fresh = True  # batches are views of the trace, which never changes

    def __init__(self, batches: np.ndarray) -> None:
        self._batches = batches

    def __iter__(self) -> "Iterator[KeyedJagged]":
        import torch

        from skirl.core.batch import KeyedJagged

        for batch in self._batches:
            yield KeyedJagged.one_hot(["id"], torch.from_numpy(batch)[:, None])


def independent_counts() -> ModuleType | None:
    """Import the independent counts by path. Return None outside a checkout."""
    if not INDEPENDENT.is_file():
        return None
    spec = importlib.util.spec_from_file_location("traffic_others", INDEPENDENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table(rows: int) -> "Table":
    from skirl.core.tables import Table

    return Table("id", rows=rows, dim=1)
