"""The traffic of one of many trainers in a step, by kind, and its planning time: counted without any rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skirl.core.tables import Schema, Table
from skirl.measure.bench.driven import Driven
from skirl.measure.bench.movement import CountSettings, Vectors, ids_of
from skirl.oracle.options import Plan

KINDS = ("values_critical", "values_early", "gradients_critical", "gradients_late", "dense", "ids", "links")
CRITICAL = ("values_critical", "gradients_critical", "dense")
"""The kinds that the loop waits for; all others travel while it computes."""
SAMPLED = 4
"""Number of owners whose halves are planned; the others only ask. Rows are hashed to owners, so all have similar work."""
IDS = 3_000_000
"""Approximate number of ids to count for each number of trainers: the more trainers, the fewer steps."""


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of one trainer in a step.

    **Arguments**

    - `trainers`: the number of trainers.
    - `bytes`: bytes that it sends, by kind; it receives as many.
    - `vectors`: values and gradients that it sends.
    - `busiest`: vectors of the busiest counted owner, relative to their mean.
    - `plan_ms`: CPU time of its planner.
    """

    trainers: int
    bytes: dict[str, float]
    vectors: float
    busiest: float
    plan_ms: float


def traffic_of(
    trainers: int, samples: int, dim: int, dense: int, seed: int = 0, rows_scale: float = 1.0
) -> StepTraffic:
    """Count some steps that production code plans.

    **Arguments**

    - `trainers`: the number of trainers.
    - `samples`: samples in a step, per trainer.
    - `dim`: numbers in a row.
    - `dense`: dense gradients in a step.
    - `seed`: seed of the ids, which are like those of Criteo Kaggle.
    - `rows_scale`: scale of the Criteo Kaggle tables.
    """
    steps = max(1, min(16, IDS // (26 * samples * trainers)))
    task = CountSettings(trainers, samples, 1, steps, 2, seed=seed, rows_scale=rows_scale)
    schema = Schema.of([Table(name, rows, dim) for name, rows in task.source.rows.items()])
    owners = sorted({trainers * n // SAMPLED for n in range(SAMPLED)})
    driven = Driven(schema, trainers, task.cache, Plan(1, ramp=False), owners)
    found, each = Vectors(), {owner: Vectors() for owner in owners}
    counted = range(task.warm, task.warm + steps)
    for number, halves in enumerate(driven.steps(ids_of(task.source, trainers))):
        if number in counted:
            for owner, half in zip(owners, halves):
                found.add(half, owner)
                each[owner].add(half, owner)
        for timed in driven.timed.values():
            timed.counts = number + 1 in counted
    share = steps * len(owners)
    vectors, vector = found.all / share, 4 * dim
    plan = sum(sum(timed.ms.values()) for timed in driven.timed.values()) / share
    ring = 2 * (trainers - 1) / trainers  # each part to its owner, and its sum back
    return StepTraffic(
        trainers,
        {
            "values_critical": vector * found.values_critical / share,
            "values_early": vector * (found.values - found.values_critical) / share,
            "gradients_critical": vector * found.gradients_critical / share,
            "gradients_late": vector * (found.gradients - found.gradients_critical) / share,
            "dense": 4 * dense * ring,
            "ids": 4 * driven.words / task.batches / len(owners),
            "links": 2 * found.values / share / 8,  # two bits a request
        },
        vectors,
        max(one.all for one in each.values()) * len(owners) / max(1, found.all),
        plan,
    )


def compiled() -> None:
    """Count a little, so that no kernel is compiled while planning is timed."""
    traffic_of(2, 16, 4, 1, rows_scale=0.001)


def all_critical(traffic: StepTraffic) -> StepTraffic:
    """Return the same traffic if the loop waited for every vector.

    **Arguments**

    - `traffic`: traffic with vectors that travel early or late.
    """
    given = traffic.bytes
    return replace(
        traffic,
        bytes=given
        | {
            "values_critical": given["values_critical"] + given["values_early"],
            "gradients_critical": given["gradients_critical"] + given["gradients_late"],
            "values_early": 0.0,
            "gradients_late": 0.0,
        },
    )


def table(all_of: Sequence[StepTraffic]) -> dict[str, Any]:
    """Return the bytes of a step by number of trainers and kind, ready for JSON.

    **Arguments**

    - `all_of`: the traffic for each number of trainers.
    """
    return {str(one.trainers): {kind: round(one.bytes[kind]) for kind in KINDS} for one in all_of}
