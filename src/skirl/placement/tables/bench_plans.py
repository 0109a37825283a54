"""Measurements of whole plans for `skirl bench place`, on tables that no cost was fitted to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skirl.placement.tables import baselines
from skirl.placement.tables.backends import arena_of
from skirl.placement.tables.bench_model import fit
from skirl.placement.tables.bench_search import LINK, problem_of
from skirl.placement.tables.check import Bench, candidates, checked
from skirl.placement.tables.measure import MeasuredTables
from skirl.placement.tables.named import OURS as SKIRL
from skirl.placement.tables.named import PRODUCTION, Backend
from skirl.placement.tables.over_gloo import over_gloo
from skirl.placement.tables.pool import PlacementTask, task
from skirl.placement.tables.problem import Placed, Problem, canonical
from skirl.placement.tables.published import pool_of
from skirl.placement.tables.search import SearchResult, search
from skirl.placement.tables.timed import TimedPlans, Times, least, measure
from skirl.placement.torchrec import fitted as torchrec_fitted
from skirl.placement.torchrec import theirs

OPTIMIZER = "rowwise-adagrad"
BATCH = 512
"""Samples of a step of the tasks."""
CELLS = tuple((ranks, dim) for ranks in (4, 8) for dim in (16, 128))
"""Number of ranks and largest dim of the tasks."""
FULL = 0.6
SEARCH, CHECK = 5.0, 4.0
"""Seconds of each search, and of measuring the best few plans."""
CHECKED = "checked"
EVERY = 5
"""One task in this many of each cell is planned by TorchRec too, in twelve ways that take seconds each."""
OURS = {
    "whole": {"columns": "never", "rows": False},
    "columns": {"columns": "always", "rows": False},
    "rows": {"columns": "exact", "rows": True},
}
"""Ways in which tables may be cut; the last is the default."""
HEADLINES = ("vs_greedy", "best_cell", "gap_closed", "vs_torchrec", "vs_row_wise", "worst_vs_any")
"""Figures that are given again by the least round, and by each half of the rounds."""


def plans(tasks: int, seed: int, backend: Backend = SKIRL, pool: str = PRODUCTION) -> dict[str, Any]:
    """Measure the busiest rank's milliseconds under our plans and under simpler plans of the same tasks.

    **Arguments**

    - `tasks`: number of tasks, taken from each of `CELLS` in turn.
    - `seed`: the random seed.
    - `backend`: the kernels to measure; skirl's on the CPU by default.
    - `pool`: the pool of the tables; costs are fitted to generated ones.
    """
    arena = arena_of(backend)
    (fitted_now, _), rng = fit(arena, OPTIMIZER, seed, backend=backend), np.random.default_rng(seed)
    made = {"batch": BATCH, "optimizer": OPTIMIZER}
    pools = {dim: pool_of(pool, 150, max_dim=dim, seed=seed + 2000 + dim, **made) for _, dim in CELLS}
    config = torchrec_fitted.hardware_config(fitted_now, OPTIMIZER) if theirs.there() else None
    cells, measured, said = [], list[TimedPlans](), list[Times]()
    for n in range(tasks):
        ranks, dim = CELLS[n % len(CELLS)]
        of = task(pools[dim], int(rng.integers(10, 61)), ranks, rng, full=FULL)
        costs = replace(fitted_now, link=LINK, ranks=ranks)
        problems = {
            name: problem_of(of, columns=how["columns"], rows=how["rows"], costs=costs) for name, how in OURS.items()
        }
        placed = baselines.all_of(problems["rows"], seed)
        found = {name: search(problem, seconds=SEARCH, seed=seed, others=2) for name, problem in problems.items()}
        placed |= {name: each.placed for name, each in found.items()}
        placed[CHECKED] = _checked(arena, of, problems["rows"], found["rows"], seed)
        if config is not None and n // len(CELLS) % EVERY == 0:
            placed |= theirs.all_of(problems["rows"], config)
        measured.append(measure(arena, of, problems["rows"], placed, seed))
        said.append(
            {name: (float(plan.load.max()), float(plan.load.mean()), 0.0, 0.0) for name, plan in placed.items()}
        )
        cells.append(f"{ranks} ranks, dims to {dim}")
    predicted = compared(cells, said)
    return compared(cells, [of.times() for of in measured]) | again(cells, measured) | {
        "predicted": {name: predicted[name] for name in ("vs_greedy", "by_cell", "gap_closed")},
        "noise": float(np.median([of.noise() for of in measured])), "link": LINK,
        "dense": _dense(cells, measured), "over_gloo": exchanged(cells, measured, seed),
    }  # fmt: skip


def _dense(cells: Sequence[str], measured: Sequence[TimedPlans]) -> dict[str, Any]:
    """Return the figures with a vector exchanged for every sample, also for those without ids, as TorchRec does."""
    found = compared(cells, [of.times(exchange=of.dense) for of in measured])
    return {name: found[name] for name in (*HEADLINES, "exchange_share")}


def exchanged(cells: Sequence[str], measured: Sequence[TimedPlans], seed: int) -> dict[str, Any]:
    """Return the figures with exchanges measured over gloo, in place of bytes over a link; or why there are none.

    **Arguments**

    - `cells`: the cell of each task.
    - `measured`: the measured plans of each task.
    - `seed`: the random seed.
    """
    try:
        exchange, by_ranks = over_gloo(measured, seed)
    except (RuntimeError, OSError) as error:  # plans were measured for half an hour, and still are
        return {"not_run": str(error)}
    found = compared(cells, [of.times(exchange=ms) for of, ms in zip(measured, exchange, strict=True)])
    kinds = {of["kind"] for of in by_ranks.values()}
    names = (*HEADLINES, "vs_greedy_compute", "vs_greedy_exchange", "exchange_share")
    return {
        "kind": "measured" if kinds == {"measured"} else "unvalidated",
        "by_ranks": by_ranks,
        **{name: found[name] for name in names},
    }


def _checked(arena: MeasuredTables, of: PlacementTask, problem: Problem, found: SearchResult, seed: int) -> Placed:
    """Return the plan that `--check` chooses, which measures another batch of the same tables."""
    heads = [of.tables[n].head for n in canonical(of.specs)]
    bench = Bench(problem, seed + 1, heads, arena)
    return checked(problem, candidates(problem, found), CHECK, seed=seed, bench=bench).best.placed


def again(cells: Sequence[str], measured: Sequence[TimedPlans]) -> dict[str, Any]:
    """Return `HEADLINES` by the least round of each rank, and by each half of the rounds: how far noise moves them.

    **Arguments**

    - `cells`: the cell of each task.
    - `measured`: the measured plans of each task.
    """

    def headlines(times: Sequence[Times]) -> dict[str, Any]:
        found = compared(cells, times)
        return {name: found[name] for name in HEADLINES}

    by_minimum = headlines([of.times(least) for of in measured])
    return {
        "by_minimum": by_minimum | {"noise": float(np.median([of.noise(least) for of in measured]))},
        "by_halves": [headlines(half) for half in zip(*(of.halves() for of in measured), strict=True)],
        "rounds": float(np.mean([len(of.rounds) for of in measured])),
    }


def compared(cells: Sequence[str], measured: Sequence[Times]) -> dict[str, Any]:
    """Return the figures of `plans`.

    **Arguments**

    - `cells`: the cell of each task.
    - `measured`: the times of each task.
    """
    by_torchrec = theirs.ratios(measured, "rows")
    in_all = [name for name in measured[0] if name not in by_torchrec]
    busiest = {name: np.array([times[name][0] for times in measured]) for name in in_all}
    single = min(baselines.SINGLE, key=lambda name: busiest[name].mean())
    ours, greedy = busiest["rows"], busiest[single]
    ratios = ours / greedy
    even = np.array([times[single][1] for times in measured])
    half = 1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    others = {name: float((ours / ms).mean()) for name, ms in busiest.items() if name not in (*OURS, CHECKED)}
    by_cell = {cell: float(ratios[[of == cell for of in cells]].mean()) for cell in dict.fromkeys(cells)}
    return {
        "tasks": len(measured),
        "greedy": single,
        "vs_greedy": float(ratios.mean()),
        "vs_greedy_95": [float(ratios.mean() - half), float(ratios.mean() + half)],
        "by_cell": by_cell,
        "best_cell": min(by_cell.values()),
        "gap_closed": float((greedy - ours).sum() / (greedy - even).sum()),
        "gap_closed_with_check": float((greedy - busiest[CHECKED]).sum() / (greedy - even).sum()),
        "vs": others,
        "vs_row_wise": others["row_wise"],
        "vs_torchrec": max(by_torchrec.values(), default=None),
        "vs_torchrec_by": by_torchrec,
        "torchrec_tasks": sum(any(name in by_torchrec for name in times) for times in measured),
        "worst_vs_any": max([*others.values(), *by_torchrec.values()]),
        "by_split": {name: float((busiest[name] / greedy).mean()) for name in OURS},
        "with_check": float((busiest[CHECKED] / greedy).mean()),
        "check_vs_without": float((busiest[CHECKED] / ours).mean()),
        **{
            f"vs_greedy_{part}": _mean_ratio([(times["rows"][n], times[single][n]) for times in measured])
            for n, part in ((2, "exchange"), (3, "compute"))
        },
        "exchange_share": float(np.mean([times["rows"][2] / times["rows"][0] for times in measured])),
    }


def _mean_ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean of ratios, without those to 0; None if there is none."""
    return float(np.mean(ratios)) if (ratios := [one / other for one, other in pairs if other > 0]) else None
