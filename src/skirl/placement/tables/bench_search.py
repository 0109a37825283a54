"""Measurements of the search alone: against every placement of small tasks, at full memory, and its time."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np

from skirl.placement.tables import baselines
from skirl.placement.tables.costs import Costs, shipped
from skirl.placement.tables.pieces import Piece, check_cover, halves, whole
from skirl.placement.tables.place import over_caps
from skirl.placement.tables.pool import PlacementTask, pool, task
from skirl.placement.tables.problem import Placed, Problem, canonical
from skirl.placement.tables.search import SearchResult, search, warm
from skirl.placement.torchrec import theirs

LINK = 1.25e9
ANYWHERE = 30
"""Small tasks that are searched with cuts anywhere as well."""
THEIRS, THEIR_SECONDS = 3, 300.0
"""At full memory, TorchRec plans one task in `THEIRS` too. Where searches are timed, its planner is stopped after
`THEIR_SECONDS`."""
SIZES = ((60, 8, 5.0), (200, 16, 15.0), (1000, 64, 90.0))
"""Tables, ranks, and seconds that a search may take."""


def problem_of(of: PlacementTask, *, columns: str = "exact", rows: bool = True, costs: Costs | None = None) -> Problem:
    """Return the problem of a task.

    **Arguments**

    - `of`: the task.
    - `columns`, `rows`: how tables may be cut.
    - `costs`: costs of parts; the sum of those that come with skirl if not given, whose best plan can be found by adding.
    """
    specs = of.specs
    costs = replace(shipped(LINK, len(of.ranks.caps)), kind="additive") if costs is None else costs
    return Problem([specs[n] for n in canonical(specs)], of.ranks, costs, columns, rows)  # type: ignore[arg-type]


def sound(problem: Problem, placed: Placed) -> bool:
    """Return whether every table is covered once and no rank is over its memory.

    **Arguments**

    - `problem`: the problem that was searched.
    - `placed`: the placement that was found.
    """
    check_cover(problem.specs, [piece for item in placed.items for piece in item])
    return max(over_caps(problem, placed)) == 0


# Against every placement


def optimum(tasks: int, seed: int) -> dict[str, Any]:
    """Compare searches of small tasks with the best of all placements of tables that are whole or halved.

    **Arguments**

    - `tasks`: number of tasks.
    - `seed`: the random seed.
    """
    rng, ratios, uneven, cut = np.random.default_rng(seed), [], [], 0
    made = pool(80, batch=512, max_dim=128, seed=seed, optimizer="sgd")
    while len(ratios) < tasks:
        ranks = int(rng.integers(2, 4))
        of = task(
            made, int(rng.integers(3, 6)), ranks, rng, full=float(rng.uniform(0.4, 0.8)), unlike=bool(rng.integers(2))
        )
        problem = problem_of(of)
        best = least(problem)
        if best == np.inf:
            continue  # they do not fit even in halves
        found = search(problem, seed=seed, uneven=False, most_pieces=2).placed
        over, busy = found.score
        ratios.append(busy / best if over == 0 and sound(problem, found) else np.inf)
        cut += len(found.items) > len(problem.specs)
        if len(uneven) < ANYWHERE:
            uneven.append(search(problem, seed=seed).placed.score[1] / best)
    return {
        "tasks": len(ratios),
        "over_optimum_mean": float(np.mean(ratios)),
        "over_optimum_max": float(np.max(ratios)),
        "with_splits": cut,
        "cuts_anywhere_mean": float(np.mean(uneven)),
        "noise": 0.0,
    }


def least(problem: Problem) -> float:
    """Return the busiest rank's milliseconds in the best placement of whole and halved tables; inf if none fits.

    **Arguments**

    - `problem`: a problem with few tables and ranks.
    """
    best = np.inf
    slow, far, caps = problem.ranks.slow, problem.ranks.far, np.array(problem.ranks.caps)
    for choice in itertools.product(*(list(_parts(problem, n)) for n in range(len(problem.specs)))):
        pieces = [piece for pieces in choice for piece in pieces]
        of = [(problem.costs.of(problem.specs[p.table], p.rows, p.dim)) for p in pieces]
        states = np.zeros((1, 2, len(caps)))  # load and bytes by rank, for each placement of the pieces so far
        for compute, exchange, nbytes in sorted(of, reverse=True):
            more = np.repeat(states[:, None], len(caps), axis=1)
            for r in range(len(caps)):
                more[:, r, 0, r] += compute * slow[r] + exchange * far[r]
                more[:, r, 1, r] += nbytes
            states = more.reshape(-1, 2, len(caps))
            states = states[(states[:, 0].max(axis=1) < best) & (states[:, 1] <= caps).all(axis=1)]
            if not len(states):
                break
        else:
            best = float(states[:, 0].max(axis=1).min())
    return best


def _parts(problem: Problem, number: int) -> Iterator[tuple[Piece, ...]]:
    """Yield a table whole, then in halves."""
    piece = whole(number, problem.specs[number])
    yield (piece,)
    for way in problem.ways((piece,)):
        pair = halves(piece, way)
        if pair is not None:
            yield pair


# At full memory


def tight(tasks: int, seed: int, seconds: float) -> dict[str, Any]:
    """Search tasks whose tables take 90 to 98% of the memory; half of the tasks have unlike ranks.

    **Arguments**

    - `tasks`: number of tasks.
    - `seed`: the random seed.
    - `seconds`: time limit of each search.
    """
    rng, made = np.random.default_rng(seed), pool(200, batch=512, max_dim=128, seed=seed)
    solved, by_greedy, over, halved = 0, {}, 0, 0
    by_torchrec: dict[str, list[bool]] = {}
    for n in range(tasks):
        of = task(
            made, int(rng.integers(10, 31)), (4, 8)[n % 2], rng, full=float(rng.uniform(0.9, 0.98)), unlike=n % 4 > 1
        )
        problem = problem_of(of)
        found = search(problem, seconds=seconds, seed=seed).placed
        solved += sound(problem, found)
        over = max(over, *over_caps(problem, found))
        halved += search(problem, seconds=seconds, seed=seed, uneven=False).placed.score[0] == 0
        for name, placed in baselines.all_of(problem, seed).items():
            by_greedy[name] = by_greedy.get(name, 0) + (max(over_caps(problem, placed)) == 0)
        if n % THEIRS == 0 and theirs.there():
            for order in theirs.ORDERS:
                placed, _ = theirs.planned(problem, theirs.PlannerSettings("rows", order))
                fits = placed is not None and max(over_caps(problem, placed)) == 0
                by_torchrec.setdefault(f"{theirs.NAME}, {order}", []).append(fits)
    return {
        "tasks": tasks,
        "solved": solved / tasks,
        "bytes_over": over,
        "solved_by_halves": halved / tasks,
        "solved_by": {name: count / tasks for name, count in by_greedy.items()}
        | {name: sum(fits) / len(fits) for name, fits in by_torchrec.items()},
        "torchrec_tasks": max(map(len, by_torchrec.values()), default=0),
        "noise": 0.0,
    }


# Time


def times(seed: int) -> dict[str, Any]:
    """Time searches of three sizes, with costs by sum and by net, and check that one second is enough for a sound plan.

    The smallest is timed once more, which tells the noise.

    **Arguments**

    - `seed`: the random seed.
    """
    made = pool(300, batch=512, max_dim=128, seed=seed)
    sizes, all_sound, noise = [], True, 0.0
    warm()
    for tables, ranks, allowed in SIZES:
        of = task(made, tables, ranks, np.random.default_rng(seed), full=0.9)
        problem = problem_of(of, columns="always")
        by_net = problem_of(of, columns="always", costs=replace(shipped(LINK, ranks), kind="net"))
        found, cpu = _timed(problem, allowed, seed)
        if (tables, ranks, allowed) == SIZES[0]:
            again = _timed(fresh(problem), allowed, seed)[1]
            noise = abs(again - cpu) / min(again, cpu)
        short, _ = _timed(fresh(problem), 1.0, seed)
        net, net_cpu = _timed(by_net, allowed, seed)
        all_sound = all_sound and all(sound(problem, each.placed) for each in (found, short, net))
        load = net.placed.load
        sizes.append(
            {"tables": tables, "ranks": ranks, "seconds": found.seconds, "cpu_seconds": cpu}
            | _time_of(found, short)
            | {"net_seconds": net.seconds, "net_cpu_seconds": net_cpu, "net_balance": float(load.max() / load.mean())}
            | _their_time(problem)
        )
    return {"sizes": sizes, "all_valid": all_sound, "noise": noise}


def _timed(problem: Problem, seconds: float, seed: int) -> tuple[SearchResult, float]:
    """Search, and return what was found and the CPU seconds."""
    began = process_time()
    return search(problem, seconds=seconds, seed=seed), process_time() - began


def fresh(problem: Problem) -> Problem:
    """Return the same problem with nothing cached.

    **Arguments**

    - `problem`: a problem that was searched.
    """
    return Problem(problem.specs, problem.ranks, problem.costs, problem.columns, problem.rows)


def _their_time(problem: Problem) -> dict[str, Any]:
    """Time TorchRec's planner in its default order, with tables whole and cut by columns. All None without TorchRec."""
    if not theirs.there():
        return {"torchrec_seconds": None, "torchrec_ended": None, "torchrec_ms": None}
    placed, took, by_itself = theirs.timed(problem, THEIR_SECONDS)
    fits = placed is not None and max(over_caps(problem, placed)) == 0
    load = placed.load if fits and placed is not None else None
    return {
        "torchrec_seconds": took, "torchrec_ended": by_itself, "torchrec_ms": None if load is None else float(load.max()),
    }  # fmt: skip


def _time_of(found: SearchResult, short: SearchResult) -> dict[str, Any]:
    load, tables = found.placed.load, len({piece.table for item in found.placed.items for piece in item})
    return {
        "states": found.states, "in_time": found.in_time, "cut": len(found.placed.items) - tables,
        "balance": float(load.max() / load.mean()), "busiest_ms": float(load.max()),
        "one_second_takes": short.seconds, "one_second_costs": float(short.placed.load.max() / load.max()),
    }  # fmt: skip
