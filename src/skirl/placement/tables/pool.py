"""Generated tables with the moments of published production tables, or the user's own; their ids; and tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from skirl.placement.tables.problem import Ranks
from skirl.placement.tables.spec import TableSpec, reuse_of

ROWS, ROWS_SD = 4.11e6, 3.13e6
"""Mean and standard deviation of the rows of 856 published tables."""
POOLING, POOLING_SD = 15.8, 25.6
"""Mean and standard deviation of the ids per sample in them."""
_ODD = 2654435761
_ACTIVE, _HEAD = 0.08, 2.5
"""The share of rows that are looked up at all, and the largest exponent of ten for `Made.head`. At batch 65,536,
this has a looked-up row looked up 7 times on average, and 47% of them once, as in published histograms."""


_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MultiHot:
    """How MLPerf makes several ids of one: each id brings the same other rows whenever it comes, drawn once from all.

    Any row may be looked up, by Zipf's law from the first one on.

    **Arguments**

    - `hots`: rows that each id brings, itself among them.
    """

    hots: int

    def ids(self, spec: TableSpec, rng: np.random.Generator) -> np.ndarray:
        """Return random rows that a batch looks up.

        **Arguments**

        - `spec`: the table.
        - `rng`: the random generator.

        >>> spec = TableSpec("a", rows=1000, dim=8, batch=4, ids=12.0, distinct=9.0)
        >>> ids = MultiHot(3).ids(spec, np.random.default_rng(0)).reshape(4, 3)
        >>> {len(set(ids[:, 2][ids[:, 0] == one])) for one in ids[:, 0].tolist()}
        {1}
        """
        rank = ((spec.rows + 1.0) ** rng.random(max(1, round(spec.ids / self.hots))) - 1).astype(np.int64)
        others = (rank[:, None] * self.hots + np.arange(1, self.hots)).astype(np.uint64)
        for shift in (32, 29):
            others = others * _MIX
            others ^= others >> np.uint64(shift)
        first = rank[:, None] * _ODD % spec.rows
        return np.concatenate([first, (others % np.uint64(spec.rows)).astype(np.int64)], axis=1).ravel()


Head = float | MultiHot | None
"""How rows are looked up: how many of them alike, before Zipf's law begins; or as MLPerf does; None: nothing is known."""


@dataclass(frozen=True)
class Made:
    """A generated table, or one that is known only by its spec.

    **Arguments**

    - `spec`: what is known of it.
    - `head`: how its rows are looked up.
    """

    spec: TableSpec
    head: Head


def ids_of(spec: TableSpec, head: Head, rng: np.random.Generator) -> np.ndarray:
    """Return random rows that a batch looks up; frequent ones lie anywhere in the table.

    **Arguments**

    - `spec`, `head`: those of the table.
    - `rng`: the random generator.
    """
    if head is None:
        return drawn(spec, rng)
    if isinstance(head, MultiHot):
        return head.ids(spec, rng)
    active = max(head, spec.rows * _ACTIVE)
    rank = (((active / head + 1) ** rng.random(round(spec.ids)) - 1) * head).astype(np.int64)
    return rank * _ODD % spec.rows


def drawn(spec: TableSpec, rng: np.random.Generator) -> np.ndarray:
    """Return random rows that a batch looks up: as many, as many distinct ones, and as often as the spec says.

    **Arguments**

    - `spec`: the table.
    - `rng`: the random generator.

    >>> ids = drawn(TableSpec("a", rows=1000, dim=8, batch=4, ids=64.0, distinct=9.0), np.random.default_rng(0))
    >>> len(ids), len(np.unique(ids))
    (64, 9)
    """
    count = max(1, round(spec.distinct))
    begins = np.arange(count + 1) * spec.rows // count
    rows = begins[:-1] + (rng.random(count) * np.diff(begins)).astype(np.int64)  # one in each stretch
    if spec.reuse:
        often = 2.0 ** np.repeat(np.arange(len(spec.reuse)), rng.multinomial(count, np.array(spec.reuse))) - 1
    else:
        often = 1 / np.arange(1.0, count + 1)
    rng.shuffle(often)
    more = max(0, round(spec.ids) - count)
    often = often if often.sum() > 0 else np.ones(count)
    ids = np.repeat(rows, 1 + rng.multinomial(more, often / often.sum()))
    rng.shuffle(ids)
    return ids


def rescaled(spec: TableSpec, batch: int, rng: np.random.Generator) -> Made:
    """Return a table as a smaller batch looks it up: with a random part of a whole batch's ids.

    **Arguments**

    - `spec`: the table.
    - `batch`: samples, at most as many as the table has.
    - `rng`: the random generator.

    >>> of = TableSpec("a", rows=1000, dim=8, batch=64, ids=640.0, distinct=90.0)
    >>> rescaled(of, 16, np.random.default_rng(0)).spec.ids
    160.0
    """
    ids = drawn(spec, rng)
    kept = rng.choice(ids, max(1, round(len(ids) * min(1.0, batch / spec.batch))), replace=False)
    counts = np.unique(kept, return_counts=True)[1]
    facts = {"batch": batch, "ids": float(len(kept)), "distinct": float(len(counts)), "reuse": reuse_of(counts)}
    return Made(replace(spec, **facts), None)


def pool(tables: int, *, batch: int, max_dim: int, seed: int, optimizer: str = "rowwise-adagrad") -> list[Made]:
    """Generate tables with the published moments.

    **Arguments**

    - `tables`: number of tables.
    - `batch`: samples of a step.
    - `max_dim`: dims are powers of two from 4 to this.
    - `seed`: the random seed.
    - `optimizer`: the row optimizer.
    """
    rng, made = np.random.default_rng(seed), []
    spread = log(1 + (POOLING_SD / POOLING) ** 2)
    dims = [1 << n for n in range(2, max_dim.bit_length())]
    for n in range(tables):
        rows = max(100, int(rng.gamma((ROWS / ROWS_SD) ** 2, ROWS_SD**2 / ROWS)))
        pooling = min(200.0, max(1.0, rng.lognormal(log(POOLING) - spread / 2, spread**0.5)))
        head = float(10 ** rng.uniform(0, _HEAD))
        spec = TableSpec(
            f"table-{n}", rows, int(rng.choice(dims)), batch, float(round(batch * pooling)), 1.0, optimizer=optimizer
        )
        made.append(counted(spec, head, rng))
    return made


def counted(spec: TableSpec, head: Head, rng: np.random.Generator) -> Made:
    """Return a table with the distinct rows and the reuse that a batch of it has.

    **Arguments**

    - `spec`, `head`: those of the table.
    - `rng`: the random generator.
    """
    counts = np.unique(ids_of(spec, head, rng), return_counts=True)[1]
    return Made(replace(spec, distinct=float(len(counts)), reuse=reuse_of(counts)), head)


@dataclass(frozen=True)
class PlacementTask:
    """Tables, and ranks to place them on.

    **Arguments**

    - `tables`: the tables.
    - `ranks`: the ranks.
    """

    tables: tuple[Made, ...]
    ranks: Ranks

    @property
    def specs(self) -> list[TableSpec]:
        """Specs of the tables, each with a name of its own."""
        return [made.spec for made in self.tables]


def task(made: Sequence[Made], count: int, ranks: int, rng: np.random.Generator, *, full: float = 0.8,
         unlike: bool = False) -> PlacementTask:  # fmt: skip
    """Pick random tables of a pool, and ranks of whose memory they take the share `full`.

    **Arguments**

    - `made`: the pool.
    - `count`, `ranks`: number of tables and of ranks.
    - `rng`: the random generator.
    - `full`: share of the memory of all ranks that the tables take.
    - `unlike`: whether ranks differ in memory, speed and link.
    """
    some = [made[n] for n in rng.choice(len(made), count, replace=count > len(made))]
    some = [Made(replace(m.spec, name=f"{m.spec.name}.{n}"), m.head) for n, m in enumerate(some)]
    held = sum(m.spec.nbytes(m.spec.rows, m.spec.dim) for m in some)
    parts = rng.choice([1.0, 2.0, 3.0], ranks) if unlike else np.ones(ranks)
    speeds = rng.choice([1.0, 1.5, 2.0], ranks) if unlike else np.ones(ranks)
    caps = tuple(int(held / full * part / parts.sum()) for part in parts)
    return PlacementTask(tuple(some), Ranks(caps, tuple(speeds.tolist()), (1.0,) * ranks))
