"""Claim: with the whole trace known, skirl refetches as few rows as any cache could ("Rows brought in again").

A run over a trace of ids is executed, and its counters must equal what the planner says beforehand. MIN and LRU are
counted by the numpy below, which shares nothing with skirl: no slots, no heap, only an array of resident rows that is
cut back to the capacity after each batch. The distinct rows of a batch are resident together; what is over the capacity
then leaves from among the others: MIN drops those whose next batch is farthest, LRU those used longest ago. A row's first
use is no fetch.

A trace is a .npy file; `zipf` draws one: id i with a chance proportional to 1 / (i + 1) ** 1.05.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from common import Bench, RepeatedBatches, main, result
from skirl.core.batch import KeyedJagged
from skirl.core.optim import SGD
from skirl.core.tables import Schema, Table
from skirl.nn.collection import EmbeddingBagCollection
from skirl.oracle.epoch import planned
from skirl.oracle.planner import Plan
from skirl.pipeline.lookahead import lookahead

MOVED = ("steps", "fetched", "forwarded", "new", "written")
"""The rows that a run moves, as the engine's counters name them."""


@dataclass(frozen=True)
class Traffic(Bench):
    """Rows that a cache fetches again on a trace of ids, against MIN, LRU, LFU and BagPipe's rule."""

    trace: str
    """A .npy file of integer ids in order of access, or zipf."""
    batch: int
    """Accesses in a batch; a last, shorter batch is dropped."""
    capacity: int
    """Rows that the cache holds."""
    depth: int | Literal["auto", "epoch"] = "epoch"
    """Batches that the oracle reads ahead: a number, auto, or epoch for the whole trace."""
    accesses: int = 4_096_000
    """Accesses of zipf."""
    rows: int = 1_000_000
    """Rows of zipf."""

    def run(self) -> dict[str, Any]:
        """Execute the trace, count it under all policies, and compare the run with its plan."""
        drawing = self.trace == "zipf"
        ids = drawn(self.accesses, self.rows) if drawing else np.load(self.trace).astype(np.int64)
        batches = batches_of(ids, self.batch)
        rows = int(batches.max()) + 1
        plan = Plan(self.depth, ramp=False)
        executed, hold_rows = self._execute(batches, rows, plan)
        planned = self._count(batches, rows, plan, hold_rows)
        if executed != planned:
            raise AssertionError(f"the executed run moved {executed}, its plan says {planned}: this is a bug in skirl")
        depth = len(batches) if self.depth == "epoch" else self.depth
        ttl = Plan(depth, policy="ttl", ramp=False)
        counts = {
            "skirl": executed["fetched"],
            "min": minimum(batches, self.capacity),
            "lru": least_recent(batches, self.capacity),
            "lfu": self._count(batches, rows, Plan(1, policy="lfu"))["fetched"],
            "ttl": self._count(batches, rows, ttl)["fetched"],
        }
        least = counts["min"]
        return result(
            "traffic", self, "batch capacity depth", trace=Path(self.trace).name,
            batches=len(batches), distinct=rows, first_uses=executed["new"], **counts,
            to_min={name: round(count / least, 4) if least else None for name, count in counts.items()},
            forwarded=executed["forwarded"], written=executed["written"],
        )  # fmt: skip

    def _execute(self, batches: np.ndarray, rows: int, plan: Plan) -> tuple[dict[str, int], list[int]]:
        """Train on every batch. Return what moved, and the rows that forwarding may hold."""
        embeddings = EmbeddingBagCollection([Table("id", rows, 1)], optimizer=SGD(lr=0.01), cache=self.capacity)
        loader = RepeatedBatches([KeyedJagged.one_hot(["id"], torch.from_numpy(batch)[:, None]) for batch in batches])
        with lookahead(loader, embeddings, sparse=lambda ids: ids, depth=plan.depth, ramp=False) as steps:
            for ids in steps:
                embeddings(ids)["id"].sum().backward()
        moved = {name: getattr(embeddings.engine.counters, name) for name in MOVED}
        hold_rows = embeddings.engine.capacity.halves
        embeddings.close()
        return moved, hold_rows

    def _count(self, batches: np.ndarray, rows: int, plan: Plan, hold_rows: list[int] | None = None) -> dict[str, int]:
        """Count with the planner alone. The only table is number 0, so a row is its own key."""
        schema = Schema.of([Table("id", rows, 1)])
        capacities = [min(self.capacity, rows)]
        steps = [step for (step,) in planned(schema, [[one] for one in batches], capacities, plan, hold_rows=hold_rows)]
        each = ((s.fetches, len(s.forward_keys), len(s.new_keys), len(s.evict_keys)) for s in steps)
        return dict(zip(MOVED, (len(steps), *map(sum, zip(*each)))))


def drawn(accesses: int, rows: int) -> np.ndarray:
    """Return ids from 0 to rows - 1, each access drawn by itself from a Zipf distribution."""
    mass = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -1.05)
    draws = np.random.default_rng(0).random(accesses) * mass[-1]
    return np.minimum(np.searchsorted(mass, draws, side="right"), rows - 1).astype(np.int64)


def batches_of(trace: np.ndarray, batch: int) -> np.ndarray:
    """Return the trace as [batches, batch] with its ids numbered 0, 1, 2, ..."""
    whole = len(trace) // batch
    _, rows = np.unique(trace[: whole * batch], return_inverse=True)
    return rows.reshape(whole, batch)


def minimum(rows: np.ndarray, capacity: int) -> int:
    """Return the rows that batch-level Belady MIN fetches again.

    >>> minimum(np.array([[0, 1], [0, 2], [0, 1], [2, 0]]), capacity=2)
    2
    """
    following = np.full(rows.max(initial=-1) + 1, len(rows))  # the row's next batch; len(rows): never again
    worth = np.empty(rows.shape, np.int64)
    for t in range(len(rows) - 1, -1, -1):
        worth[t] = -following[rows[t]]
        following[rows[t]] = t
    return _refetches(rows, worth, capacity)


def least_recent(rows: np.ndarray, capacity: int) -> int:
    """Return the rows that batch-level LRU fetches again."""
    return _refetches(rows, np.arange(rows.size).reshape(rows.shape), capacity)


def _refetches(rows: np.ndarray, worth: np.ndarray, capacity: int) -> int:
    """Count the fetches when each batch keeps the resident rows of greatest worth; `worth` is that after each access."""
    many = rows.max(initial=-1) + 1
    seen, resident, value = np.zeros(many, bool), np.zeros(many, bool), np.zeros(many, np.int64)
    held = np.empty(0, np.int64)  # the resident rows, listed
    fetches = 0
    for ids, gained in zip(rows, worth, strict=True):
        now = np.unique(ids)
        fetches += int(np.count_nonzero(seen[now] & ~resident[now]))
        seen[now] = True
        value[ids] = gained  # a row that comes twice in the batch keeps the value of the last
        resident[held] = False
        resident[now] = True
        others, room = held[~resident[held]], capacity - len(now)
        if len(others) > room:
            others = others[np.argpartition(-value[others], room - 1)[:room]] if room else others[:0]
        held = np.concatenate([now, others])
        resident[others] = True
    return fetches


if __name__ == "__main__":
    main(Traffic)
