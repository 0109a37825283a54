"""The search over cuts by columns: a beam over halvings, each state placed greedily and then improved by moves and swaps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.costs import TERMS, Costs
from skirl.placement.pieces import Piece, halves
from skirl.placement.problem import Placed, Problem
from skirl.placement.spec import TableSpec

WIDTH, WIDEST, TOGETHER = 3, 60, 8000
"""States that a beam keeps: `WIDTH`, or more for few tables, up to `WIDEST`, so that states times the square of the
number of items are about `TOGETHER`. Few tables on many ranks need cuts of several of them at once, which a narrow beam
drops on the way."""
CANDIDATES, MORE_CANDIDATES, FEW = 10, 20, 24
"""Items of a state that are cut: `CANDIDATES`, or `MORE_CANDIDATES` where there are at most `FEW` tables."""
PATIENCE = 3
"""Depths without gain after which the beam ends."""
MEMORY_WEIGHTS = (0.0, 0.5, 2.0, 8.0)
"""The greedy grid: weights of bytes relative to time, in the orders in which items are placed."""
SMALL = 150
"""Up to this many items, each state is also placed from nothing."""
_LEAST_GAIN = 1e-6
BEAM = 0.8
"""Share of the time by which the beam ends."""


@dataclass
class SearchResult:
    """The best placement, whether the search ended by itself, and the next best ones."""

    placed: Placed
    seconds: float = 0.0
    in_time: bool = True
    others: list[Placed] = field(default_factory=list)


def beam_search(
    problem: Problem, *, seconds: float = 30.0, now: Callable[[], float] = time.perf_counter
) -> SearchResult:
    """Search for a placement of tables, whole or cut by columns, whose busiest rank is hardly busier than it has to be.

    It exceeds a cap only if no placement within the caps is found. The plan of a search that ends by itself depends only
    on the problem.
    """
    warm()
    return _Beam(problem, seconds, now).run()


@cache
def warm() -> None:
    """Search two small tables, once in a process, so that no later search compiles or loads a loop on its own time."""
    optimizer = next(iter(ROW_OPTIMIZERS))
    specs = [TableSpec(name, 64, 8, 4, 8.0, 8.0, optimizer=optimizer) for name in ("a", "b")]
    problem = Problem(specs, (1 << 20,) * 2, Costs({optimizer: (1.0,) * len(TERMS)}, 1e9, 2))
    _Beam(problem, 1.0, lambda: 0.0).run()


class _Beam:
    def __init__(self, problem: Problem, seconds: float, now: Callable[[], float]) -> None:
        self.problem = problem
        self.now, self.began, self.seconds = now, now(), seconds
        self.ended = False
        self.memo: dict[frozenset[Piece], Placed] = {}
        self.best: Placed | None = None
        self.root = problem.root()
        self.whole = set(self.root)
        self.may = {n for n, spec in enumerate(problem.specs) if problem.by_columns(spec)}

    def late(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is over."""
        late = self.now() - self.began >= self.seconds * share
        self.ended = self.ended or late
        return late

    def run(self) -> SearchResult:
        first = self.placed_anew(self.root)
        self.take(first)
        if any(piece.table in self.may for piece in self.root):
            self.beam([first])
        assert self.best is not None
        if self.ended and self.best.score[0]:
            self.fit()
        return SearchResult(self.best, self.now() - self.began, not self.ended)

    def fit(self) -> None:
        """Look for a placement within memory although time is up: a moment, in which nothing is made faster."""
        for order in self.orders(self.root):
            placed = self.problem.improved(self.problem.greedy(self.root, order), most=4 * len(self.root))
            self.take(placed)
            if placed.score[0] == 0:
                return

    def take(self, placed: Placed) -> None:
        """Keep a placement if it is the best so far."""
        if self.best is None or placed.score < self.best.score:
            self.best = placed

    def key(self, items: Sequence[Piece]) -> frozenset[Piece]:
        """Identify a state by the pieces of cut tables, whatever way led to it."""
        return frozenset(piece for piece in items if piece not in self.whole)

    def orders(self, items: tuple[Piece, ...]) -> list[np.ndarray]:
        compute, exchange, nbytes, *_ = self.problem.arrays(items)
        ms = compute + exchange
        bound = self.problem.bytes_of.sum() < 4 * nbytes.sum()
        weights = MEMORY_WEIGHTS if bound else MEMORY_WEIGHTS[:1]
        share = nbytes / nbytes.sum() * ms.sum()
        return [np.argsort(-(ms + weight * share), kind="stable") for weight in weights]

    def placed_anew(self, items: tuple[Piece, ...]) -> Placed:
        best = None
        for order in self.orders(items):
            placed = self.problem.improved(self.problem.greedy(items, order), clock=self.late)
            if best is None or placed.score < best.score:
                best = placed
            if self.late():
                break
        assert best is not None
        return best

    def beam(self, states: list[Placed]) -> None:
        best, waited = min(state.score for state in states), 0
        width = max(WIDTH, min(WIDEST, TOGETHER // len(states[0].items) ** 2))
        while waited < PATIENCE and not self.late(BEAM):
            children = list[Placed]()
            for state in states:
                key = self.key(state.items)
                for item in self.largest(state):
                    if self.late(BEAM):
                        break
                    child = self.child(state, key, item)
                    if child is not None:
                        self.take(child)
                        children.append(child)
            if not children:
                return
            states = sorted([*states, *children] if waited == 0 else children, key=lambda placed: placed.score)[:width]
            gained = states[0].score < (best[0], best[1] * (1 - _LEAST_GAIN))
            best, waited = min(best, states[0].score), 0 if gained else waited + 1

    def largest(self, state: Placed) -> list[int]:
        """Return items to cut: of the busiest rank, of the one most over its cap, and the largest anywhere."""
        compute, exchange, nbytes, *_ = self.problem.arrays(state.items)
        ms = compute + exchange
        over = state.used - state.caps
        picked = list[int]()
        most = MORE_CANDIDATES if len(self.root) <= FEW else CANDIDATES

        def pick(sizes: np.ndarray, which: np.ndarray, most: int) -> None:
            order = np.argsort(-np.where(which, sizes, -1), kind="stable")
            may = [i for i in order.tolist() if which[i] and i not in picked and state.items[i].table in self.may]
            picked.extend(may[:most])

        if over.max() > 0:
            pick(nbytes, state.at == over.argmax(), most // 3)
        pick(ms, state.at == state.load.argmax(), most // 2)
        pick(ms, np.ones(len(ms), bool), most - len(picked))
        return picked

    def child(self, state: Placed, key: frozenset[Piece], item: int) -> Placed | None:
        """Return a state with one item halved, or None if that state is known. `key` is the key of `state`."""
        problem, pair = self.problem, halves(state.items[item])
        if pair is None:
            return None
        key = key - {state.items[item]} | set(pair)
        if key in self.memo:
            return None
        items = problem.with_cut(state.items, item, pair)
        at = np.delete(state.at, item)
        start = problem.at(items, np.concatenate([at, [state.at[item], state.load.argmin()]]))
        best = problem.improved(start, clock=self.late)
        if len(items) <= SMALL:
            best = min(best, self.placed_anew(items), key=lambda placed: placed.score)
        self.memo[key] = best
        return best
