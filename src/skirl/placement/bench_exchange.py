"""`skirl bench place --part exchange`: count bytes as rows and as pooled vectors, and compare what trainers send."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from skirl.data.synthetic import Synthetic
from skirl.measure.bench import wire
from skirl.measure.bench.helpers import processes
from skirl.placement.exchange import ExchangeCount, TableIds, ids_of
from skirl.placement.exchange_bound import least_vectors
from skirl.placement.tables import pool

TRAINERS = (2, 3, 4, 6, 8)
TABLES, BATCH, DIM = 60, 8192, 16
BATCHES = 3
"""Batches of each stream. A batch of 8,192 holds the ids of thousands of users, so a few are enough."""
RUN = (2, 512, 6, 8)
"""Number of trainers that are run, and the samples, batches and dim that they train."""


def measured(seed: int) -> dict[str, Any]:
    """Return the figures of this part.

    **Arguments**

    - `seed`: the random seed.
    """
    made = pool.pool(TABLES, batch=BATCH, max_dim=128, seed=seed)
    tables = [(of.spec.name, of.spec.dim) for of in made]
    production = _counted(tables, lambda trainers: _made(made, trainers, seed))
    source = Synthetic("criteo-kaggle", batch_size=BATCH, batches=BATCHES, seed=seed)
    criteo_tables = source.tables(DIM)
    criteo = _counted(
        [(t.name, t.dim) for t in criteo_tables],
        lambda trainers: (ids_of(batch.sparse, criteo_tables, trainers) for batch in source),
    )
    last = production[str(TRAINERS[-1])]
    least = sum(
        of.spec.dim * 4 * 2 * least_vectors(ids) / BATCHES
        for batch in _made(made, TRAINERS[-1], seed)
        for of, ids in zip(made, batch, strict=True)
    )
    return {
        "production": production,
        "criteo": criteo,
        "vs_rows": last["vs_rows"],
        "vs_pooled": last["vs_pooled"],
        "vs_pooled_least": least / last["pooled"],
        "noise": 0.0,
        "criteo_vs_pooled": criteo[str(TRAINERS[-1])]["vs_pooled"],
        **ran(seed),
    }


def _counted(tables: Sequence[tuple[str, int]], batches: Any) -> dict[str, Any]:
    found = {}
    for trainers in TRAINERS:
        exchange = ExchangeCount(tables, trainers)
        for batch in batches(trainers):
            exchange.add(batch)
        facts = exchange.facts()
        found[str(trainers)] = {name: value for name, value in facts.items() if name != "tables"}
    return found


def _made(made: Sequence[pool.Made], trainers: int, seed: int) -> Iterator[list[TableIds]]:
    """Yield batches of generated tables, with ids assigned to samples at random."""
    edges = [BATCH * n // trainers for n in range(trainers + 1)]
    bags = [end - begin for begin, end in pairwise(edges)]
    for number in range(BATCHES):
        batch = []
        for n, of in enumerate(made):
            rng = np.random.default_rng([seed, number, n])
            ids = pool.ids_of(of.spec, of.head, rng)
            sample = rng.integers(0, BATCH, len(ids))
            mine = [(a <= sample) & (sample < b) for a, b in pairwise(edges)]
            of = [sample[which] - a for which, a in zip(mine, edges)]
            batch.append(TableIds([ids[which] for which in mine], bags, of))
        yield batch


def ran(seed: int) -> dict[str, Any]:
    """Return the vectors that processes sent, and the number counted for owners by hash.

    **Arguments**

    - `seed`: random seed of the ids.
    """
    trainers, batch, steps, dim = RUN
    args = map(str, (batch, steps, dim, seed))
    ranks = processes(trainers, ["-m", "skirl.measure.bench.network", "wire", *args])
    sent = sum(sum(rank["channels"][name]["sent"]) for rank in ranks for name in wire.VECTORS)
    counted = counted_of(trainers, batch, steps, dim, seed)
    return {
        "ran_trainers": trainers,
        "vectors_sent": sent,
        "vectors_counted": counted,
        "bytes_sent": sent * dim * 4,
        "bytes_counted": counted * dim * 4,
        "differ": abs(sent - counted),
    }


def counted_of(trainers: int, batch: int, steps: int, dim: int, seed: int) -> int:
    """Count the vectors that owners by hash would exchange in the run of `skirl bench network`.

    **Arguments**

    - `trainers`, `batch`, `steps`, `dim`, `seed`: settings of that run.
    """
    sources = [wire.source_of(batch, steps, dim, seed)[0].sharded(n, n + 1, trainers) for n in range(trainers)]
    tables = wire.source_of(batch, steps, dim, seed)[1]
    exchange = ExchangeCount([(t.name, t.dim) for t in tables], trainers)
    for parts in zip(*sources, strict=True):
        each = [ids_of(part.sparse, tables, 1) for part in parts]
        exchange.add([_joined(column) for column in zip(*each, strict=True)])
    return int(exchange.vectors["hashed"].sum())


def _joined(parts: Sequence[TableIds]) -> TableIds:
    """Return what all trainers look up in a table, from what each looks up alone."""
    of, samples = ([getattr(part, name)[0] for part in parts] for name in ("of", "samples"))
    return TableIds([part.rows[0] for part in parts], [part.bags[0] for part in parts], of, samples)


def told(result: dict[str, Any]) -> dict[str, str]:
    """Return the result as printed lines, by name.

    **Arguments**

    - `result`: what `measured` returned.
    """
    lines = {}
    for kind in ("production", "criteo"):
        for trainers, of in result[kind].items():
            lines[f"{kind}, {trainers} trainers"] = (
                f"rows {of['rows'] / 1e6:,.1f} MB a step (owners by hash {of['hashed'] / 1e6:,.1f}, their "
                f"partial sums {of['partial'] / 1e6:,.1f}), pooled "
                f"{of['pooled'] / 1e6:,.1f}, the better by table {of['better'] / 1e6:,.1f}: {of['vs_rows']:.2f} of rows, "
                f"{of['vs_pooled']:.2f} of pooled; {of['as_rows']} tables as rows, {of['as_pooled']} pooled"
            )
    return lines | {
        "bound": f"no plan goes below {result['vs_pooled_least']:.3f} of pooled, production, {TRAINERS[-1]} trainers",
        "measured": f"{result['ran_trainers']} trainers sent {result['vectors_sent']:,} vectors, counted "
        f"{result['vectors_counted']:,}",
    }
