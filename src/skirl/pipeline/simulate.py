"""The planner alone, on a stream of keys: what a run would move, without moving a row.

It is the planner of training, so it counts what a run does; `benchmarks/traffic.py` compares the two."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import numpy as np

from skirl.core.tables import Schema
from skirl.oracle.epoch import Epoch
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner, bank_planners
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step

Keys = list[np.ndarray]
"""The keys of one batch, bank after bank."""


@dataclass(frozen=True)
class Totals:
    """The rows that a run moves. The fields have the names of the engine's counters."""

    steps: int = 0
    fetched: int = 0
    forwarded: int = 0
    new: int = 0
    written: int = 0


def simulate(
    schema: Schema,
    batches: Iterable[Keys],
    capacities: Sequence[int],
    plan: Plan,
    *,
    hold_rows: Sequence[int] | None = None,
) -> Totals:
    """Count what a run over these batches moves, from an empty cache and an empty store.

    `hold_rows`: evicted rows of each bank that can be forwarded at any moment. It turns fetches from the store into
    forwards and changes no other count.
    """
    fetched = forwarded = new = written = steps = 0
    for banks in planned(schema, batches, capacities, plan, hold_rows=hold_rows):
        steps += 1
        for step in banks:
            fetched += step.fetches
            forwarded += len(step.forward_keys)
            new += len(step.new_keys)
            written += len(step.evict_keys)
    return Totals(steps, fetched, forwarded, new, written)


def planned(
    schema: Schema,
    batches: Iterable[Keys],
    capacities: Sequence[int],
    plan: Plan,
    *,
    hold_rows: Sequence[int] | None = None,
) -> Iterator[list[Step]]:
    """Yield the Steps of a run over these batches, one for each bank, as soon as their window is full.

    The window's limit in bytes counts only the keys; a run counts all that it holds of each batch.
    """
    planner = Planner[None](bank_planners(schema, capacities, plan, Seen(schema), hold_rows=hold_rows), plan)
    with closing(Epoch(schema)) if plan.depth == "epoch" else nullcontext() as epoch:
        if epoch is not None:
            if iter(batches) is batches:
                raise ValueError('depth="epoch" reads the batches twice, and this is an iterator: pass a list')
            for keys in batches:
                epoch.add(keys)
            epoch.scan()
        for keys in batches:
            next_uses = None if epoch is None else epoch.next_uses()
            planner.add(None, keys, sum(part.nbytes for part in keys), next_uses)
            yield from _ready(planner)
        planner.end()
        yield from _ready(planner)


def _ready(planner: Planner[None]) -> Iterator[list[Step]]:
    while (planned := planner.next()) is not None:
        planner.executed(planned[1][0].number)
        yield planned[1]
