"""Pools of published tables: those of Criteo's data sets, and those that MLPerf trains DLRM-DCNv2 with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skirl.data.synthetic import SHAPES
from skirl.placement.tables.named import PRODUCTION
from skirl.placement.tables.pool import Made, MultiHot, counted, pool
from skirl.placement.tables.spec import TableSpec

MOST_ROWS = 40_000_000
"""MLPerf hashes the ids of larger tables to so many rows."""
HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids of a sample in each of MLPerf's 26 tables."""


@dataclass(frozen=True)
class PublishedTable:
    """What is published of a table.

    **Arguments**

    - `name`, `rows`: of the table.
    - `hots`: ids of a sample.
    """

    name: str
    rows: int
    hots: int = 1


def sizes(name: str) -> list[PublishedTable]:
    """Return the tables of a published pool.

    **Arguments**

    - `name`: its name.

    >>> sum(of.rows for of in sizes("mlperf")), sum(of.hots for of in sizes("mlperf"))
    (204184588, 214)
    """
    if name == "mlperf":
        rows = SHAPES["criteo-terabyte"].rows
        return [PublishedTable(of, min(n, MOST_ROWS), hots) for (of, n), hots in zip(rows.items(), HOTS, strict=True)]
    return [PublishedTable(of, n) for of, n in SHAPES[name].rows.items()]


def published(
    name: str, *, batch: int, dims: Sequence[int], seed: int, optimizer: str = "rowwise-adagrad"
) -> list[Made]:
    """Return the tables of a published pool. How often rows are looked up is not published: Zipf's law is taken.

    **Arguments**

    - `name`: its name.
    - `batch`: samples of a step.
    - `dims`: dims to choose from at random.
    - `seed`: the random seed.
    - `optimizer`: the row optimizer.
    """
    rng, made = np.random.default_rng([seed, 3]), []
    for of in sizes(name):
        spec = TableSpec(
            of.name, of.rows, int(rng.choice(dims)), batch, float(batch * of.hots), 1.0, optimizer=optimizer
        )
        made.append(counted(spec, MultiHot(of.hots), rng))
    return made


def pool_of(
    name: str, tables: int, *, batch: int, max_dim: int, seed: int, optimizer: str = "rowwise-adagrad"
) -> list[Made]:
    """Return a pool by name: a published one, or generated tables.

    **Arguments**

    - `name`: its name.
    - `tables`: number of tables to generate; published pools have their own.
    - `batch`: samples of a step.
    - `max_dim`: dims are powers of two from 4 to this.
    - `seed`: the random seed.
    - `optimizer`: the row optimizer.
    """
    if name == PRODUCTION:
        return pool(tables, batch=batch, max_dim=max_dim, seed=seed, optimizer=optimizer)
    dims = [1 << n for n in range(2, max_dim.bit_length())]
    return published(name, batch=batch, dims=dims, seed=seed, optimizer=optimizer)
