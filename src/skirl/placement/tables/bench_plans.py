"""What `skirl bench place` measures of whole plans, on tables that no cost was fitted to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skirl.placement.tables import baselines
from skirl.placement.tables.bench_model import fit
from skirl.placement.tables.bench_search import LINK, problem_of
from skirl.placement.tables.measure import Arena, Lookups, Part, noise_of, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Task, pool, task
from skirl.placement.tables.problem import Placed, Problem, canonical
from skirl.placement.tables.search import search

OPTIMIZER = "rowwise-adagrad"
BATCH = 512
"""Samples of the tasks."""
CELLS = tuple((ranks, dim) for ranks in (4, 8) for dim in (16, 128))
"""Ranks and the largest dim of the tasks."""
FULL = 0.6
SEARCH = 2.0
PLAN_ROUNDS = 4
OURS = {
    "whole": {"columns": "never", "rows": False},
    "columns": {"columns": "always", "rows": False},
    "rows": {"columns": "exact", "rows": True},
}
"""How tables may be cut; the last is the default."""


def plans(tasks: int, seed: int) -> dict[str, Any]:
    """Measured milliseconds of the busiest rank, ours beside simpler plans of the same tasks.

    **Arguments**

    - `tasks`: how many, in turns of each of `CELLS`.
    - `seed`: of chance.
    """
    arena = Arena()
    (fitted_now, _), rng = fit(arena, OPTIMIZER, seed), np.random.default_rng(seed)
    pools = {dim: pool(150, batch=BATCH, max_dim=dim, seed=seed + 2000 + dim, optimizer=OPTIMIZER) for _, dim in CELLS}
    cells, measured, noise = [], list[Mapping[str, tuple[float, float, float]]](), []
    for n in range(tasks):
        ranks, dim = CELLS[n % len(CELLS)]
        of = task(pools[dim], int(rng.integers(10, 61)), ranks, rng, full=FULL)
        costs = replace(fitted_now, link=LINK, ranks=ranks)
        problems = {
            name: problem_of(of, columns=how["columns"], rows=how["rows"], costs=costs) for name, how in OURS.items()
        }
        placed = baselines.all_of(problems["rows"], seed)
        placed |= {name: search(problem, seconds=SEARCH, seed=seed).placed for name, problem in problems.items()}
        times, rounds_noise = measure(arena, of, problems["rows"], placed, seed)
        cells.append(f"{ranks} ranks, dims to {dim}")
        measured.append(times)
        noise.append(rounds_noise)
    return compared(cells, measured) | {"noise": float(np.median(noise)), "link": LINK}


def measure(
    arena: Arena, of: Task, problem: Problem, placed: Mapping[str, Placed], seed: int
) -> tuple[dict[str, tuple[float, float, float]], float]:
    """Of each plan the busiest rank's milliseconds, computing measured and exchange counted, the mean rank's, and exchange.

    **Arguments**

    - `arena`: to measure in.
    - `of`: the task.
    - `problem`: of it.
    - `placed`: the plans.
    - `seed`: of chance.
    """
    order = canonical(of.specs)
    lookups = [Lookups(of.tables[n], seed * 1000 + n) for n in order]
    ready: dict[Piece, Part] = {}

    def part(piece: Piece) -> Part:
        if piece not in ready:
            ready[piece] = Part(arena, lookups[piece.table], piece)
        return ready[piece]

    ranks = range(len(of.ranks.caps))
    combinations = [[part(p) for p in plan.pieces(r)] for plan in placed.values() for r in ranks]
    rounds = rounds_of(arena, combinations, PLAN_ROUNDS, seed)
    compute = rounds.min(axis=0).reshape(len(placed), -1)
    times = {}
    for (name, plan), ms in zip(placed.items(), compute, strict=True):
        exchange = np.array([sum(problem.cost(p)[1] for p in plan.pieces(r)) for r in ranks])
        times[name] = (float((ms + exchange).max()), float((ms + exchange).mean()), float(exchange.max()))
    return times, noise_of(rounds[:, rounds.min(axis=0) > 0])


def compared(cells: Sequence[str], measured: Sequence[Mapping[str, tuple[float, float, float]]]) -> dict[str, Any]:
    """The figures of `plans`.

    **Arguments**

    - `cells`: of each task.
    - `measured`: of each task, by plan: busiest, mean, exchange.
    """
    busiest = {name: np.array([times[name][0] for times in measured]) for name in measured[0]}
    single = min(baselines.SINGLE, key=lambda name: busiest[name].mean())
    ours, greedy = busiest["rows"], busiest[single]
    ratios = ours / greedy
    even = np.array([times[single][1] for times in measured])
    half = 1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    others = {name: float((ours / ms).mean()) for name, ms in busiest.items() if name not in OURS}
    by_cell = {cell: float(ratios[[of == cell for of in cells]].mean()) for cell in dict.fromkeys(cells)}
    return {
        "tasks": len(measured),
        "greedy": single,
        "vs_greedy": float(ratios.mean()),
        "vs_greedy_95": [float(ratios.mean() - half), float(ratios.mean() + half)],
        "by_cell": by_cell,
        "best_cell": min(by_cell.values()),
        "gap_closed": float((greedy - ours).sum() / (greedy - even).sum()),
        "vs": others,
        "vs_row_wise": others["row_wise"],
        "worst_vs_any": max(others.values()),
        "by_split": {name: float((busiest[name] / greedy).mean()) for name in OURS},
        "exchange_share": float(np.mean([times["rows"][2] / times["rows"][0] for times in measured])),
    }
