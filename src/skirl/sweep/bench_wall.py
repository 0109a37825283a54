"""Time a race to its winner against lone runs of all variants, one after the other, in wall-clock time."""

from typing import Any

from skirl.measure.bench.helpers import Stopwatch
from skirl.sweep.bench_race import RUNGS, grid
from skirl.sweep.command import SweepCommand
from skirl.sweep.variants import Varied
from skirl.train.commands import Train
from skirl.train.recipe import Recipe

LONE = 3
"""How many variants are timed alone (the first, a middle one and the last); the time of all is scaled up from their mean."""
_WARM = 20
"""Steps before anything is timed, in which kernels are compiled."""


def wall(recipe: Recipe, count: int, alpha: float) -> dict[str, Any]:
    """Time the race of 16 or 32 variants and lone runs of them, each through its command in this process.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `count`: number of variants, 16 or 32.
    - `alpha`: the probability of dropping the best for a deficit.
    """
    variants = grid(recipe, count)[:count]
    steps = recipe.stream().steps or sum(1 for _ in recipe.stream())
    flags = recipe.flat() | {"run": "none", "quiet": True, "steps": steps}
    rungs = ",".join(f"{share * 100:g}%" for share in RUNGS[count])
    rates = {name: sorted({v.overrides[name] for v in variants}) for name in ("lr", "dense_lr")}
    vary = tuple(f"{name}={','.join(map(str, values))}" for name, values in rates.items())
    race = SweepCommand.of(**flags, vary=vary, rungs=rungs, alpha=alpha)
    Train.of(**_alone(flags, variants[0]) | {"steps": _WARM}).run()
    SweepCommand.of(**flags | {"steps": _WARM}, vary=vary[:1]).run()
    with Stopwatch() as watch:
        raced = race.run()
    lone, cpu = [], []
    for variant in (variants[0], variants[count // 2], variants[-1])[:LONE]:
        with Stopwatch() as alone:
            Train.of(**_alone(flags, variant)).run()
        lone.append(alone.seconds)
        cpu.append(alone.cpu)
    of_all, cpu_of_all = (count * sum(each) / len(each) for each in (lone, cpu))
    raced_cpu = watch.cpu + (raced["cpu_seconds"] if raced["processes_used"] > 1 else 0.0)
    return {
        "variants": count, "seconds": watch.seconds, "cpu": raced_cpu, "cost": raced["cost"], "winner": raced["winner"],
        "lone": lone, "lone_of_all": of_all, "sooner": of_all / watch.seconds, "less_cpu": cpu_of_all / raced_cpu,
        "processes": raced["processes_used"],
    }  # fmt: skip


def _alone(flags: dict[str, Any], variant: Varied) -> dict[str, Any]:
    return flags | {name: value for name, value in variant.overrides.items() if name != "seed"}
