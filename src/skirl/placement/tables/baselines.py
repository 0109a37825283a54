"""Plans to compare with: greedy rules for whole tables, chance, and every table cut by rows over all ranks."""

from collections.abc import Callable

import numpy as np

from skirl.placement.tables.pieces import Piece, whole
from skirl.placement.tables.problem import Item, Placed, Problem
from skirl.placement.tables.spec import TableSpec

Measure = Callable[[TableSpec], float]
MEASURES: dict[str, Measure] = {
    "size": lambda s: float(s.rows * s.dim),
    "dim": lambda s: float(s.dim),
    "lookup": lambda s: s.ids * s.dim,
    "size_lookup": lambda s: s.ids * s.dim * np.log10(s.rows),
}
"""The load of a table, according to each single rule."""
SINGLE = ("size", "dim", "lookup", "size_lookup")


def by_measure(problem: Problem, name: str) -> Placed:
    """Place whole tables, largest first, each on the rank with room where the sum of this measure is least.

    **Arguments**

    - `problem`: tables and ranks.
    - `name`: one of `MEASURES`.
    """
    sizes = [MEASURES[name](spec) for spec in problem.specs]
    return _placed(problem, np.argsort(-np.array(sizes), kind="stable"), sizes)


def by_costs(problem: Problem) -> Placed:
    """Place whole tables in the same way, by their fitted costs."""
    sizes = [sum(problem.cost(whole(n, spec))[:2]) for n, spec in enumerate(problem.specs)]
    return _placed(problem, np.argsort(-np.array(sizes), kind="stable"), sizes)


def by_chance(problem: Problem, seed: int) -> Placed:
    """Place each table on a random rank that has room.

    **Arguments**

    - `problem`: tables and ranks.
    - `seed`: the random seed.
    """
    rng = np.random.default_rng(seed)
    caps, used = problem.ranks.bytes_of, np.zeros(len(problem.ranks.caps), np.int64)
    at = np.zeros(len(problem.specs), np.int64)
    for n in rng.permutation(len(problem.specs)).tolist():
        nbytes = problem.cost(whole(n, problem.specs[n]))[2]
        free = np.flatnonzero(used + nbytes <= caps)
        at[n] = rng.choice(free) if len(free) else rng.integers(len(caps))
        used[at[n]] += nbytes
    return problem.at(_whole(problem), at)


def row_wise(problem: Problem) -> Placed:
    """Cut every table by rows, evenly over all ranks."""
    items, at, ranks = list[Item](), list[int](), len(problem.ranks.caps)
    for n, spec in enumerate(problem.specs):
        ends = [spec.rows * r // ranks for r in range(ranks + 1)]
        for r in range(ranks):
            if ends[r] < ends[r + 1]:
                items.append((Piece(n, ends[r], ends[r + 1], 0, spec.dim),))
                at.append(r)
    return problem.at(tuple(items), np.array(at))


def all_of(problem: Problem, seed: int) -> dict[str, Placed]:
    """Return every baseline by name.

    **Arguments**

    - `problem`: tables and ranks.
    - `seed`: the random seed.
    """
    return {
        "random": by_chance(problem, seed),
        **{name: by_measure(problem, name) for name in SINGLE},
        "additive_lpt": by_costs(problem),
        "row_wise": row_wise(problem),
    }


def _whole(problem: Problem) -> tuple[Item, ...]:
    return tuple((whole(n, spec),) for n, spec in enumerate(problem.specs))


def _placed(problem: Problem, order: np.ndarray, sizes: list[float]) -> Placed:
    caps, ranks = problem.ranks.bytes_of, len(problem.ranks.caps)
    used, load, at = np.zeros(ranks, np.int64), np.zeros(ranks), np.zeros(len(sizes), np.int64)
    for n in order.tolist():
        nbytes = problem.cost(whole(n, problem.specs[n]))[2]
        room = used + nbytes <= caps
        at[n] = np.where(room, load, np.inf).argmin() if room.any() else (used - caps).argmin()
        load[at[n]] += sizes[n]
        used[at[n]] += nbytes
    return problem.at(_whole(problem), at)
