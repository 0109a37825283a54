"""Measuring plans, one rank after the other: the best few of a search, then those of searches that know these times."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skirl.placement.tables import baselines
from skirl.placement.tables.allowed import forbidden
from skirl.placement.tables.measure import Lookups, MeasuredTables, noise_of, rounds_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.pool import Head, Made
from skirl.placement.tables.problem import Placed, Problem
from skirl.placement.tables.search import SearchResult, search
from skirl.placement.tables.spec import TableSpec

ROUNDS = 4
"""Rounds of each comparison; the least time counts."""
AGAIN = 3
"""Number of the given plans that are measured twice."""
PATIENCE = 2
"""Climbs without gain after which the check ends."""
SEARCH = 0.25
"""Share of the remaining time that a search with measured times may take."""


class Bench:
    """A bench that measures the plans of a problem.

    **Arguments**

    - `problem`: tables and ranks.
    - `seed`: random seed of the batch.
    - `heads`: heads of generated tables; None: nothing is known of the tables but their specs.
    - `arena`: memory to measure in; a new one if not given.
    """

    def __init__(
        self, problem: Problem, seed: int, heads: Sequence[Head] | None = None, arena: MeasuredTables | None = None
    ) -> None:
        self.problem, self.seed, self.arena = problem, seed, arena or MeasuredTables()
        self._heads = heads
        self._lookups: dict[int, Lookups] = {}
        self._parts: dict[Piece, Any] = {}
        self.noise: list[float] = []
        """Noise of each comparison."""
        self.least: dict[tuple[Piece, ...], float] = {}
        """Least time of each list of pieces so far: a busy neighbour can only add to it."""

    def _part(self, piece: Piece) -> Any:
        if piece not in self._parts:
            if piece.table not in self._lookups:
                spec = self.problem.specs[piece.table]
                number = self.seed * 1000 + piece.table
                head = None if self._heads is None else self._heads[piece.table]
                self._lookups[piece.table] = Lookups(Made(spec, head), number)
            self._parts[piece] = self.arena.ready(self._lookups[piece.table], piece)
        return self._parts[piece]

    def ms(self, pieces: Sequence[Sequence[Piece]], late: Callable[[], bool]) -> np.ndarray:
        """Measure the CPU milliseconds of a step for each list of pieces, in turns, and return the least so far.

        **Arguments**

        - `pieces`: lists of pieces, each on one rank.
        - `late`: whether time is up.
        """
        ready = [[self._part(piece) for piece in of] for of in pieces]
        rounds = rounds_of(self.arena, ready, ROUNDS, self.seed + len(self.noise), late=late)
        ms = rounds.min(axis=0)
        busy = [n for n, of in enumerate(pieces) if of]
        self.noise.append(noise_of(rounds[:, busy]) if busy else 0.0)
        for of, least in zip(pieces, ms.tolist(), strict=True):
            known = tuple(sorted(of))
            self.least[known] = min(self.least.get(known, least), least) if of else 0.0
        return np.array([self.least[tuple(sorted(of))] for of in pieces])

    def plans(self, plans: Sequence[Placed], late: Callable[[], bool] = lambda: False) -> list[np.ndarray]:
        """Return what each rank of each plan computes, in milliseconds at the rank's speed.

        **Arguments**

        - `plans`: plans to measure.
        - `late`: whether time is up.
        """
        ranks = range(len(self.problem.ranks.caps))
        ms = self.ms([plan.pieces(rank) for plan in plans for rank in ranks], late)
        return [of * self.problem.ranks.slow for of in ms.reshape(len(plans), -1)]


def exchange_of(problem: Problem, placed: Placed) -> np.ndarray:
    """Count the milliseconds that each rank exchanges.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `placed`: a plan.
    """
    ranks = problem.ranks
    ms = [sum(problem.cost(p)[1] for p in placed.pieces(rank)) for rank in range(len(ranks.caps))]
    return np.array(ms) * ranks.far


@dataclass(frozen=True)
class Corrected:
    """Costs, multiplied by a measured factor for each table.

    **Arguments**

    - `inner`: the costs to correct.
    - `factors_of`: factors by table name.
    """

    inner: Any
    factors_of: Mapping[str, float]

    def of(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, float, int]:
        """Return what `Costs.of` returns, corrected."""
        compute, exchange, nbytes = self.inner.of(spec, rows, dim)
        return compute * self.factors_of.get(spec.name, 1.0), exchange, nbytes

    def compute(self, spec: TableSpec, rows: int, dim: int) -> float:
        """Return what `Costs.compute` returns, corrected."""
        return self.of(spec, rows, dim)[0]

    def part(self, spec: TableSpec, rows: int, dim: int) -> tuple[float, np.ndarray]:
        """Return what `Costs.part` returns, corrected."""
        compute, adds = self.inner.part(spec, rows, dim)
        return compute * self.factors_of.get(spec.name, 1.0), adds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def corrected(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the same problem with costs corrected by measurements.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `factors`: by table name, the factor for its costs of computing.
    """
    costs: Any = Corrected(problem.costs, factors)
    return Problem(problem.specs, problem.ranks, costs, problem.columns, problem.rows)


@dataclass
class Tried:
    """A plan that was measured.

    **Arguments**

    - `name`: where it comes from.
    - `placed`: the plan.
    - `predicted`: predicted milliseconds of the busiest rank.
    - `compute`: measured milliseconds of each rank.
    - `busiest`: measured milliseconds of the busiest rank, with its exchange.
    - `after`: seconds since the check began.
    """

    name: str
    placed: Placed
    predicted: float
    compute: np.ndarray
    busiest: float
    after: float = 0.0


@dataclass
class Checked:
    """The result of measuring plans.

    **Arguments**

    - `best`: the plan to use.
    - `tried`: all plans that were measured, in order.
    - `noise`: relative difference between measurements of the same thing.
    - `seconds`: how long it took.
    """

    best: Tried
    tried: list[Tried] = field(default_factory=list)
    noise: float = 0.0
    seconds: float = 0.0


def checked(
    problem: Problem,
    plans: Mapping[str, Placed],
    seconds: float,
    *,
    seed: int = 0,
    bench: Bench | None = None,
    told: Callable[[Checked], None] = lambda _: None,
    find: Callable[..., SearchResult] = search,
    now: Callable[[], float] = time.monotonic,
) -> Checked:
    """Return the plan that takes least when it is measured.

    The first of `plans` has to be the one that is predicted to be best.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `plans`: plans to measure, by name; all within memory.
    - `seconds`: time limit; the given plans are always measured, the best few of them twice.
    - `seed`: random seed of the batch and of the search.
    - `bench`: where to measure; a new one if not given.
    - `told`: called with the result so far when plans were measured.
    - `find`: the search; takes a problem, seconds and a seed.
    - `now`: the clock.
    """
    began, bench = now(), bench or Bench(problem, seed)

    def late() -> bool:
        return now() - began >= seconds

    def measured(some: Mapping[str, Placed]) -> list[Tried]:
        found = []
        for (name, plan), ms in zip(some.items(), bench.plans(list(some.values()), late), strict=True):
            busiest = float((ms + exchange_of(problem, plan)).max())
            found.append(Tried(name, plan, plan.score[1], ms, busiest, now() - began))
        return found

    first = {of.name: of for of in measured(plans)}
    again = sorted(first, key=lambda name: first[name].busiest)[:AGAIN]
    first |= {of.name: of for of in measured({name: plans[name] for name in again})} if len(again) > 1 else {}
    result = Checked(first[next(iter(plans))], list(first.values()))
    result.best = better(bench, result.best, min(first.values(), key=lambda of: of.busiest))
    told(result)
    known, waited, climbs = {cells(plan) for plan in plans.values()}, 0, 0
    factors: dict[str, float] = {}
    while not late() and waited < PATIENCE:
        climbs += 1
        factors |= learned(bench, result.best, late)
        found = find(
            corrected(problem, factors), seconds=SEARCH * (seconds - (now() - began)), seed=seed + climbs
        ).placed
        plan = problem.at(found.items, found.at)
        if plan.score[0] or cells(plan) in known:
            waited += 1
            continue
        known.add(cells(plan))
        best, other = measured({result.best.name: result.best.placed, f"climbed {climbs}": plan})
        result.tried = [best if of.name == best.name else of for of in result.tried] + [other]
        result.best = better(bench, best, other)
        waited = 0 if result.best is other else waited + 1
        told(result)
    result.noise, result.seconds = float(np.median(bench.noise)), now() - began
    return result


def better(bench: Bench, best: Tried, other: Tried) -> Tried:
    """Return the other plan if it takes less by more than the noise of measuring, else the best so far.

    **Arguments**

    - `bench`: where they were measured.
    - `best`: the best so far.
    - `other`: what may replace it.
    """
    return other if other.busiest < best.busiest * (1 - float(np.median(bench.noise))) else best


def learned(bench: Bench, best: Tried, late: Callable[[], bool]) -> dict[str, float]:
    """Return, by table, the factor between measured and predicted times of a plan.

    Each table's factor comes from its pieces measured alone; one more factor for all of them makes up for the ranks as
    a whole. With costs by net, a piece alone is compared with what the net predicts for it alone, and ranks with what
    it then predicts for them, so that the net's factor of a rank is not counted twice.

    **Arguments**

    - `bench`: where to measure.
    - `best`: the plan.
    - `late`: whether time is up.
    """
    problem = bench.problem
    pieces = [piece for item in best.placed.items for piece in item]
    alone = bench.ms([[piece] for piece in pieces], late)
    said = problem.costs.together([[(problem.specs[p.table], p.rows, p.dim)] for p in pieces])
    sums: dict[str, np.ndarray] = {}
    for piece, ms in zip(pieces, zip(alone, said, strict=True), strict=True):
        name = problem.specs[piece.table].name
        sums[name] = sums.get(name, np.zeros(2)) + ms
    factors = {name: float(was / said) for name, (was, said) in sums.items() if was > 0 and said > 0}
    placed, slow = best.placed, problem.ranks.slow
    predicted = corrected(problem, factors).at(placed.items, placed.at).load - exchange_of(problem, placed)
    together = float((best.compute / slow).sum() / max((predicted / slow).sum(), 1e-9))
    return {name: factor * together for name, factor in factors.items()}


def cells(placed: Placed) -> frozenset[tuple[Piece, int]]:
    """Return which piece is at which rank, regardless of order.

    **Arguments**

    - `placed`: a plan.
    """
    return frozenset(
        (piece, rank) for item, rank in zip(placed.items, placed.at.tolist(), strict=True) for piece in item
    )


def candidates(problem: Problem, found: SearchResult) -> dict[str, Placed]:
    """Return the best few plans of a search, and simple ones, without those that exceed memory or are forbidden.

    **Arguments**

    - `problem`: the problem that was searched.
    - `found`: the result of the search.
    """
    plans = {"predicted 1": found.placed}
    plans |= {f"predicted {n}": placed for n, placed in enumerate(found.others, start=2)}
    plans |= {"longest first": baselines.by_costs(problem), "row-wise": baselines.row_wise(problem)}
    seen, kept = set(), {}
    for name, placed in plans.items():
        if placed.score[0] == 0 and forbidden(problem, placed) is None and cells(placed) not in seen:
            seen.add(cells(placed))
            kept[name] = placed
    return kept
