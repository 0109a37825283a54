"""Tables with the moments of published production tables, made by chance; their ids; and tasks drawn from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from skirl.placement.tables.problem import Ranks
from skirl.placement.tables.spec import TableSpec, reuse_of

ROWS, ROWS_SD = 4.11e6, 3.13e6
"""Mean and deviation of 856 published tables."""
POOLING, POOLING_SD = 15.8, 25.6
"""Ids of a sample in them."""
_ODD = 2654435761
_SPREAD = 8.0
"""Skew: ids are rows * u**k with u even in 0 to 1 and k around this; 5 to 7 accesses a distinct row at batch 65,536."""


@dataclass(frozen=True)
class Made:
    """A table made by chance.

    **Arguments**

    - `spec`: what is known of it.
    - `skew`: k above.
    """

    spec: TableSpec
    skew: float


def ids_of(spec: TableSpec, skew: float, rng: np.random.Generator) -> np.ndarray:
    """Rows that a batch looks up; frequent ones lie anywhere in the table.

    **Arguments**

    - `spec`, `skew`: of the table.
    - `rng`: chance.
    """
    rank = (spec.rows * rng.random(round(spec.ids)) ** skew).astype(np.int64)
    return rank * _ODD % spec.rows


def pool(tables: int, *, batch: int, max_dim: int, seed: int, optimizer: str = "rowwise-adagrad") -> list[Made]:
    """Tables of the published moments.

    **Arguments**

    - `tables`: how many.
    - `batch`: samples.
    - `max_dim`: dims are powers of two from 4 to this.
    - `seed`: of chance.
    - `optimizer`: of rows.
    """
    rng, made = np.random.default_rng(seed), []
    spread = log(1 + (POOLING_SD / POOLING) ** 2)
    dims = [1 << n for n in range(2, max_dim.bit_length())]
    for n in range(tables):
        rows = max(100, int(rng.gamma((ROWS / ROWS_SD) ** 2, ROWS_SD**2 / ROWS)))
        pooling = min(200.0, max(1.0, rng.lognormal(log(POOLING) - spread / 2, spread**0.5)))
        skew = float(rng.uniform(2, 2 * _SPREAD - 2))
        spec = TableSpec(
            f"table-{n}", rows, int(rng.choice(dims)), batch, float(round(batch * pooling)), 1.0, optimizer=optimizer
        )
        counts = np.unique(ids_of(spec, skew, rng), return_counts=True)[1]
        made.append(Made(replace(spec, distinct=float(len(counts)), reuse=reuse_of(counts)), skew))
    return made


@dataclass(frozen=True)
class Task:
    """Tables, and ranks to place them on.

    **Arguments**

    - `tables`: which.
    - `ranks`: where.
    """

    tables: tuple[Made, ...]
    ranks: Ranks

    @property
    def specs(self) -> list[TableSpec]:
        """Of the tables, each with a name of its own."""
        return [made.spec for made in self.tables]


def task(made: Sequence[Made], count: int, ranks: int, rng: np.random.Generator, *, full: float = 0.8,
         unlike: bool = False) -> Task:  # fmt: skip
    """Some tables of a pool, whose memory takes this share of that of all ranks.

    **Arguments**

    - `made`: the pool.
    - `count`, `ranks`: how many tables and ranks.
    - `rng`: chance.
    - `full`: share of the memory.
    - `unlike`: whether ranks differ in memory, speed and link.
    """
    some = [made[n] for n in rng.choice(len(made), count, replace=count > len(made))]
    some = [Made(replace(m.spec, name=f"{m.spec.name}.{n}"), m.skew) for n, m in enumerate(some)]
    held = sum(m.spec.nbytes(m.spec.rows, m.spec.dim) for m in some)
    parts = rng.choice([1.0, 2.0, 3.0], ranks) if unlike else np.ones(ranks)
    speeds = rng.choice([1.0, 1.5, 2.0], ranks) if unlike else np.ones(ranks)
    caps = tuple(int(held / full * part / parts.sum()) for part in parts)
    return Task(tuple(some), Ranks(caps, tuple(speeds.tolist()), (1.0,) * ranks))
