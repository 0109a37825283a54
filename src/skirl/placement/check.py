"""Measuring the best few plans of a search, one rank after the other, before one of them is recommended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skirl.placement.lookups import Lookups
from skirl.placement.measure import Arena, noise_of, rounds_of
from skirl.placement.pieces import Piece
from skirl.placement.problem import Placed, Problem
from skirl.placement.search import SearchResult

PLANS, ROUNDS = 3, 4
"""Plans that are measured, and rounds in which they take turns; the least time of each rank counts."""


@dataclass(frozen=True)
class Checked:
    """The plan to use, its measured milliseconds of computing by rank, those of each plan's busiest rank, and the noise."""

    placed: Placed
    compute: np.ndarray
    busiest: list[float]
    chosen: int
    noise: float


def exchange_of(problem: Problem, placed: Placed) -> np.ndarray:
    """Return the milliseconds that each rank exchanges."""
    exchange = problem.arrays(placed.items)[1]
    return np.bincount(placed.at, exchange, minlength=len(problem.caps))


def computing_ms(problem: Problem, plans: Sequence[Placed], arena: Arena, seed: int) -> tuple[np.ndarray, float]:
    """Measure the milliseconds that each rank of each plan computes, [plans, ranks], and the noise of measuring."""
    lookups = [Lookups(spec, seed * 1000 + n) for n, spec in enumerate(problem.specs)]
    ready: dict[Piece, object] = {}
    ranks = range(len(problem.caps))
    for piece in {piece for plan in plans for piece in plan.items}:
        ready[piece] = arena.ready(lookups[piece.table], piece)
    combinations = [[ready[piece] for piece in plan.pieces(rank)] for plan in plans for rank in ranks]
    rounds = rounds_of(arena, combinations, ROUNDS, seed)
    busy = np.array([bool(of) for of in combinations])  # an empty rank computes nothing
    return (rounds.min(axis=0) * busy).reshape(len(plans), -1), noise_of(rounds[:, busy])


def check_plans(problem: Problem, found: SearchResult, arena: Arena, seed: int = 0) -> Checked:
    """Measure the best plans of a search; one replaces the plan predicted to be best if it is better than the noise."""
    plans = [found.placed, *found.others][:PLANS]
    ms, noise = computing_ms(problem, plans, arena, seed)
    busiest = [float((of + exchange_of(problem, plan)).max()) for of, plan in zip(ms, plans, strict=True)]
    least = int(np.argmin(busiest))
    chosen = least if busiest[least] < busiest[0] * (1 - noise) else 0
    return Checked(plans[chosen], ms[chosen], busiest, chosen, noise)
