"""Parts of benchmarks/sweep.py: what planned steps hold and cost, and what they wait for their link."""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from skirl.pipeline.lookahead import lookahead
from skirl.sweep.entrant import sweep_of
from skirl.sweep.memory.orchestrate import Memory
from skirl.sweep.memory.policy import Choice, Planner, operators_again
from skirl.sweep.memory.schedule import Schedule, Step, in_pairs, in_turns, with_transfers
from skirl.sweep.variants import Varied
from skirl.train.recipe import Recipe
from tests.sweep.planned import Case, EmulatedLink, chain, on_demand_of

RATE = 32e9
"""Bytes a second of the emulated link: PCIe 4, as in the paper."""
FUSED = 2
"""Variants that fit at once without memory work; its limit is that of the others."""


def memory(recipe: Recipe) -> dict[str, Any]:
    """Compare bytes simulated and held for five models; then train more variants under the limit of a few that hold
    everything at once, and compare the time of a variant's step."""
    simulated, measured = {}, {}
    for name in ("dlrm", "dcnv2", "din", "dcat", "transformer"):
        case = Case(name)
        plan = Planner([timed(case.step)], 0, RATE).least()
        simulated[name], measured[name] = plan.figures.peak, case.run(plan)[1]
    free = Memory(1 << 60, EmulatedLink(RATE))
    *_, _ = steps(recipe, 1, free)
    assert free.plan is not None
    limit = FUSED * (free.held + free.plan.figures.peak)
    least = Planner(list(free.plan.schedule.steps), 0, RATE).least().figures.peak
    more = (limit - least) // free.held
    count, tight = min(more, 4 * FUSED), Memory(limit, EmulatedLink(RATE))
    in_turns = [*zip(steps(recipe, count, tight), steps(recipe, count, None), strict=True)]
    settled = in_turns[len(in_turns) // 2 :]
    assert tight.plan is not None
    return {
        "peak_simulated": simulated, "peak_measured": measured, "more_variants": more / FUSED,
        "slower": median(planned / eager for planned, eager in settled), "variants": count, "limit": limit,
        "held": tight.held, "peak": tight.plan.figures.peak, "seconds": median(eager for _, eager in settled),
    }  # fmt: skip


def spread(recipe: Recipe, count: int) -> list[Varied]:
    """Return variants that differ in the learning rate of rows."""
    rates = [recipe.rates.lr * (1 + number / count) for number in range(count)]
    recipes = [replace(recipe, rates=replace(recipe.rates, lr=lr)) for lr in rates]
    return [Varied(f"lr-{number}", {"lr": own.rates.lr}, recipe=own) for number, own in enumerate(recipes)]


def steps(recipe: Recipe, count: int, planned: Memory | None) -> Iterator[float]:
    """Yield the time of a variant's step for each batch."""
    sweep = sweep_of(recipe, spread(recipe, count))
    with sweep, lookahead(recipe.stream(), sweep, depth=recipe.cache.depth) as batches:
        for batch in batches:
            began = time.perf_counter()
            if planned is None:
                sweep.step(batch)
            else:
                planned.step(sweep.racing, batch, sweep.forms._loss)
            yield (time.perf_counter() - began) / count


def timed(step: Step) -> Step:
    return replace(step, seconds=dict.fromkeys(step.operators, 1e-5))


def overlap(layers: int = 12, size: int = 8 << 20) -> dict[str, Any]:
    """Return by rate, in GB/s, the shares of the time for which packs of a chain of layers wait if what moves comes back
    on demand, behind the own backward, and in pairs; and the share of work that runs again where a plan may choose."""
    step = chain(layers, size)
    steps, orders, moves = [step] * 4, [step.order()] * 4, [[f"f{place}.0" for place in range(layers - 2)]] * 4
    stalls, again = {}, {}
    for rate in (1, 2, 4, 8, 16, 32, 64):
        own, pairs = (
            with_transfers(steps, runs, moves, 24 * size, rate * 1e9) for runs in (in_turns(orders), in_pairs(orders))
        )
        ways = {"on_demand": on_demand_of(own), "own_backward": own, "pairs": pairs}
        stalls[rate] = {name: waiting(schedule) for name, schedule in ways.items()}
        plan = Planner(steps, layers // 2 * size, rate * 1e9).best()
        ran = operators_again(step, plan.choices[step] if step in plan.choices else Choice()) or ()
        again[rate] = sum(step.seconds[name] for name in ran) / sum(step.seconds.values())
    return {"stall": stalls, "recompute": again}


def waiting(schedule: Schedule) -> float:
    figures = schedule.check()
    return figures.stall / figures.seconds
