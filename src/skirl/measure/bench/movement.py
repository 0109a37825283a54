"""Vectors that cross between trainers in a step, with owners and with other schemes, counted from production plans."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.optim import Adam, RowwiseAdagrad
from skirl.core.positions import Positions
from skirl.core.tables import Schema, Table
from skirl.data.synthetic import Synthetic
from skirl.measure.bench.best_owner import best_owners
from skirl.measure.bench.driven import Driven, Half
from skirl.measure.bench.owners import parts_of
from skirl.oracle.options import Plan

NEVER = np.iinfo(np.int32).max
BIT = np.uint64(1)
BEST = 60
"""The best owners are found over this many steps at most, the first ones."""
RATIOS = ("rows_vs_allreduce", "critical_vs_allreduce", "rows_vs_alltoall", "rows_vs_best")
"""The movement of other schemes, relative to owners by key; rows_vs_best: owners by key, relative to the best owners."""


@dataclass(frozen=True)
class CountSettings:
    """The settings of a count.

    **Arguments**

    - `ranks`: the number of trainers.
    - `samples`: samples in a step, per trainer.
    - `window`: batches known ahead, both for our owners and for the published rule.
    - `steps`: the number of steps that are counted, after `warm` steps that fill the caches.
    - `cache`: slots of each trainer. 8 times 675,000 is what the published rule holds: all rows that a window of 200
      batches uses, plus those of a quarter of a window that wait to be swept out.
    - `dim`: numbers in a row's vector.
    - `seed`: seed of the ids.
    - `rows_scale`: scale of the Criteo Kaggle tables.
    """

    ranks: int
    samples: int = 2048
    window: int = 200
    steps: int = 10
    warm: int = 5
    cache: int = 675_000
    dim: int = 48
    seed: int = 0
    rows_scale: float = 1.0

    @property
    def batches(self) -> int:
        """Number of batches in the stream, which goes on for a window after the last counted step."""
        return self.warm + self.steps + self.window + 1

    @property
    def source(self) -> Synthetic:
        """The stream of batches."""
        return Synthetic(
            "criteo-kaggle",
            batch_size=self.ranks * self.samples,
            batches=self.batches,
            seed=self.seed,
            rows_scale=self.rows_scale,
        )


@dataclass(slots=True)
class StepRows:
    """The distinct rows of one step."""

    keys: np.ndarray
    """int64, those of all owners."""
    once: np.ndarray
    """bool: exactly one id of the global batch uses the row."""
    users: np.ndarray
    """uint64: a bit for each trainer that uses the row."""


@dataclass
class Vectors:
    """Numbers of vectors that owners and other trainers exchange in some steps."""

    values: int = 0
    values_critical: int = 0
    gradients: int = 0
    gradients_critical: int = 0

    def add(self, half: Half, owner: int) -> None:
        """Count one owner's half of a step.

        **Arguments**

        - `half`: the owner's half of the step.
        - `owner`: its rank; what it asks of itself crosses no network.
        """
        remote = np.ones(int(half.serve[-1]), np.bool_)
        remote[half.serve[owner] : half.serve[owner + 1]] = False
        self.values += int(remote.sum())
        self.gradients += int(remote.sum())
        self.values_critical += int((remote & half.values).sum())
        self.gradients_critical += int((remote & half.gradients).sum())

    @property
    def all(self) -> int:
        """Values and gradients."""
        return self.values + self.gradients

    @property
    def critical(self) -> int:
        """The values and gradients that the loop waits for."""
        return self.values_critical + self.gradients_critical


@dataclass
class Counted:
    """The counts over the halves of a stream."""

    owned: Vectors = field(default_factory=Vectors)
    """Vectors of the counted steps."""
    rows: list[StepRows] = field(default_factory=list)
    """Rows of all steps, including those of the last window."""
    plan_ms: dict[str, float] = field(default_factory=dict)
    """Planning time of the busiest owner in CPU milliseconds per step, by task."""
    id_bytes: float = 0.0
    """Bytes of ids that a trainer sends ahead of time, per step."""


def ids_of(source: Synthetic, ranks: int) -> Iterator[list[Positions]]:
    """Yield the ids of every trainer for each batch, in the order of features.

    **Arguments**

    - `source`: the stream.
    - `ranks`: the number of trainers; each gets an equal part of the samples.
    """
    tables, batch = np.arange(len(source.rows)), source.batch_size
    parts = np.stack([tables, tables * batch, (tables + 1) * batch, 0 * tables], axis=1)
    for drawn in source:
        yield parts_of(Positions(drawn.sparse.values().numpy(), parts), ranks)


def counted(
    schema: Schema, batches: Iterable[Sequence[Positions]], ranks: int, capacity: int, window: int, steps: range
) -> Counted:
    """Count what trainers exchange.

    **Arguments**

    - `schema`: tables of one dim.
    - `batches`: the ids of each batch, by trainer.
    - `ranks`: the number of trainers.
    - `capacity`: slots of each trainer.
    - `window`: batches that an owner knows when it plans.
    - `steps`: the steps to count.
    """
    out, driven = Counted(), Driven(schema, ranks, capacity, Plan(window, ramp=False))
    for number, halves in enumerate(driven.steps(batches)):
        out.rows.append(_rows(halves))
        if number in steps:
            for owner, half in zip(driven.owners, halves):
                out.owned.add(half, owner)
        for timed in driven.timed.values():  # batches enter long before their step: time one of each per counted step
            timed.counts = number + 1 in steps
    busiest = max((timed.ms for timed in driven.timed.values()), key=lambda ms: sum(ms.values()))
    out.plan_ms = {what: ms / len(steps) for what, ms in busiest.items()}
    out.id_bytes = 4 * driven.words / max(1, len(out.rows)) / ranks
    return out


def _rows(halves: Sequence[Half]) -> StepRows:
    keys, once, users = [], [], []
    for half in halves:
        step = half.step
        begin, pos = step.group_start[:-1], step.group_pos
        reader = np.repeat(np.arange(len(half.serve) - 1, dtype=np.uint64), np.diff(half.serve))
        keys.append(step.keys)
        once.append(np.add.reduceat(half.ids[pos], begin) == 1 if len(begin) else np.empty(0, np.bool_))
        users.append(np.bitwise_or.reduceat(BIT << reader[pos], begin) if len(begin) else np.empty(0, np.uint64))
    return StepRows(*map(np.concatenate, (keys, once, users)))


def published(schema: Schema, rows: Sequence[StepRows], window: int, steps: range) -> dict[str, int]:
    """Count the rows that BagPipe's rule synchronises now, later and not at all, if every trainer holds every row.

    now: the next batch uses the row. none: one sample uses it, and no batch in the window after it. later: the rest.

    **Arguments**

    - `schema`: the schema of the tables.
    - `rows`: the rows of each step, a window more than are counted.
    - `window`: batches ahead that the rule knows.
    - `steps`: the steps to count.
    """
    number = numbering(schema)
    following = np.full(sum(table.rows for table in schema.tables), NEVER, np.int32)
    out = {"now": 0, "later": 0, "none": 0}
    for step in reversed(range(len(rows))):
        mine = number(rows[step].keys)
        if step in steps:
            use = following[mine]
            now = use == step + 1
            none = rows[step].once & (use > step + window)
            out["now"] += int(now.sum())
            out["none"] += int(none.sum())
            out["later"] += int((~now & ~none).sum())
        following[mine] = step
    return out


def numbering(schema: Schema) -> Any:
    """Return a function from keys to row numbers, which count the rows of all tables from 0 on.

    **Arguments**

    - `schema`: the schema of the tables.
    """
    first = np.cumsum([0, *(table.rows for table in schema.tables)])
    return lambda keys: first[keys >> ROW_BITS] + (keys & ((1 << ROW_BITS) - 1))


def schemes(task: CountSettings) -> dict[str, Any]:
    """Count vectors per step with owners by key and with the other schemes, and compute the ratios.

    **Arguments**

    - `task`: the settings.
    """
    began, source = time.perf_counter(), task.source
    schema = Schema.of([Table(name, rows, task.dim) for name, rows in source.rows.items()])
    steps = range(task.warm, task.warm + task.steps)
    found = counted(schema, ids_of(source, task.ranks), task.ranks, task.cache, task.window, steps)
    rows = published(schema, found.rows, task.window, steps)
    ring = 2 * (task.ranks - 1)
    known = found.rows[:BEST]  # owners by key are counted over the same steps
    best, by_key = best_owners(
        numbering(schema), known, task.ranks, task.dim, [RowwiseAdagrad().width(task.dim), Adam().width(task.dim)]
    )
    vectors = {
        "owners": found.owned.all,
        "owners_critical": found.owned.critical,
        "values_critical": found.owned.values_critical,
        "gradients_critical": found.owned.gradients_critical,
        "allreduce": ring * (rows["now"] + rows["later"]),
        "allreduce_now": ring * rows["now"],
        "alltoall": 2 * len(source.rows) * task.samples * (task.ranks - 1) * task.steps,
    }
    return {
        "trainers": task.ranks,
        "batch": source.batch_size,
        "window": task.window,
        "rows_vs_allreduce": vectors["allreduce"] / vectors["owners"],
        "critical_vs_allreduce": vectors["allreduce_now"] / vectors["owners_critical"],
        "rows_vs_alltoall": vectors["alltoall"] / vectors["owners"],
        "rows_vs_best": {name: by_key / best[n] for n, name in enumerate(("rowwise_adagrad", "adam"))},
        "vectors": {name: count / task.steps for name, count in vectors.items()},
        "rows": {name: count / task.steps for name, count in rows.items()},
        "plan_ms": found.plan_ms,
        "id_bytes": found.id_bytes,
        "seconds": time.perf_counter() - began,
    }
