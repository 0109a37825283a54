"""The search: greedy starts, moves and swaps, a beam over halvings, cuts anywhere; the best so far when time is up."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from skirl.core.optim import ROW_OPTIMIZERS
from skirl.placement.tables import balance
from skirl.placement.tables.costs import Costs
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.problem import Item, Placed, Problem, Ranks
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.terms import TERMS
from skirl.placement.tables.uneven import fill, level, tidied

WIDTH, WIDEST, TOGETHER = 3, 60, 8000
"""States that a beam keeps: `WIDTH`, or more for few tables, up to `WIDEST`, so that states times the square of the
number of items are about `TOGETHER`. Few tables on many ranks need cuts of several of them at once, which a narrow beam
drops on the way."""
CANDIDATES, MORE_CANDIDATES, FEW = 10, 20, 24
"""Items of a state that are cut: `CANDIDATES`, or `MORE_CANDIDATES` where there are at most `FEW` tables."""
PATIENCE = 3
"""Depths without gain after which the beam ends."""
MEMORY_WEIGHTS = (0.0, 0.5, 2.0, 8.0)
"""Weights of bytes relative to time, in the orders in which items are placed."""
COARSE = (1.0, 0.5, 0.25)
"""Shares of the mean load: one start for each, in which larger items are halved until they are smaller."""
WORTH = 0.8
"""Most of a piece's time that a half of it may take in those starts: cutting rows does not reduce the exchange."""
LEVELLED = 8
"""For this many numbers of cuts, the best state of the beam is cut anywhere."""
KICKS = 60
WORTH_LEVELLING = 1.05
"""A state is cut anywhere if its time is at most this many times the best one's."""
TINY, TINY_KICKS = 16, 8
"""Each state with up to `TINY` items is shaken, `TINY_KICKS` times."""
SMALL = 150
"""Up to this many items, each state is also placed from nothing, and the best one is shaken at the end."""
_LEAST_GAIN = 1e-6
BEAM, BEAM_ALONE = 0.5, 0.8
"""Share of the time by which the beam ends: if shaking follows it, and if nothing but cuts anywhere does."""
_SPARED = 0.05
"""Largest share of the time that is kept back, so that work before the next look at the clock does not overrun."""


@dataclass
class SearchResult:
    """The result of a search.

    **Arguments**

    - `placed`: the best placement.
    - `seconds`: how long it took.
    - `states`: number of states that were placed.
    - `in_time`: whether it ended by itself, so that more time gives the same plan.
    - `curve`: seconds and score of each new best placement.
    - `others`: the next best placements, within memory.
    """

    placed: Placed
    seconds: float = 0.0
    states: int = 0
    in_time: bool = True
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    others: list[Placed] = field(default_factory=list)


def search(
    problem: Problem,
    *,
    seconds: float = 30.0,
    seed: int = 0,
    uneven: bool = True,
    most_pieces: int | None = None,
    others: int = 0,
    told: Callable[[int, float], None] = lambda states, busiest: None,
    now: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """Search for a placement whose busiest rank is hardly busier than it has to be.

    It exceeds a cap only if no placement within the caps is found. The loops are compiled before the clock starts.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `seconds`: time limit; the plan of a search that ends before it depends only on the other arguments.
    - `seed`: the random seed.
    - `uneven`: whether cuts are moved off the halves in the end.
    - `most_pieces`: most pieces of a table; None: any number.
    - `others`: number of next best placements to return as well.
    - `told`: called often with the number of states placed, and the busiest rank's milliseconds so far.
    - `now`: the clock.
    """
    warm()
    return _Search(problem, seconds, seed, uneven, most_pieces, told, now).run(others)


@cache
def warm() -> None:
    """Search two small tables, once in a process, so that no later search compiles or loads a loop on its own time."""
    optimizer = next(iter(ROW_OPTIMIZERS))
    specs = [TableSpec(name, 64, 8, 4, 8.0, 8.0, optimizer=optimizer) for name in ("a", "b")]
    problem = Problem(specs, Ranks.like(2, 1 << 20), Costs({optimizer: (1.0,) * len(TERMS)}, 1e9, 2))
    _Search(problem, 1.0, 0, False, 2, lambda states, busiest: None, lambda: 0.0).run(0)


class _Search:
    def __init__(
        self,
        problem: Problem,
        seconds: float,
        seed: int,
        uneven: bool,
        most_pieces: int | None,
        told: Callable[[int, float], None],
        now: Callable[[], float],
    ) -> None:
        self.problem, self.seed, self.uneven, self.most_pieces = problem, seed, uneven, most_pieces
        self.told = told
        self.now, self.began, self.seconds = now, now(), seconds
        self.looked, self.longest, self.ended = 0.0, 0.0, False
        self.memo: dict[frozenset[Piece], Placed] = {}
        self.found: SearchResult | None = None
        self.whole = {item for item in problem.root() if len(item) == 1}
        self.beam_ends = BEAM if len(problem.root()) <= SMALL else BEAM_ALONE

    def late(self, share: float = 1.0) -> bool:
        """Return whether this share of the time is over, or would be at a next look as late as any before it."""
        if self.found is not None:
            self.told(self.states(), self.found.placed.score[1])
        at = self.now() - self.began
        self.longest, self.looked = max(self.longest, at - self.looked), at
        late = at + min(self.longest, _SPARED * self.seconds) >= self.seconds * share
        self.ended = self.ended or late
        return late

    def run(self, others: int) -> SearchResult:
        problem, root = self.problem, self.problem.root()
        first = self.placed_anew(root)
        self.take(first)
        if first.score[0] and self.uneven:
            self.take(fill(problem, first, self.late))
        if any(problem.ways(item) for item in root):
            self.beam([first, *self.coarse(root)])
        assert self.found is not None
        if self.uneven:
            self.take(self.levelled(self.found.placed))
            least = dict[int, Placed]()  # the best for each number of cuts: fewer cuts may gain more by what follows
            for placed in self.best(len(self.memo) if len(root) <= SMALL else 0):
                least.setdefault(len(placed.items), placed)
            for placed in list(least.values())[:LEVELLED]:
                self.take(self.levelled(placed))
        if len(self.found.placed.items) <= SMALL:
            self.take(self.shaken(self.found.placed, KICKS, self.uneven))
        if self.ended and self.found.placed.score[0]:
            self.fit(root)
        self.found.seconds, self.found.states = self.now() - self.began, self.states()
        self.found.in_time = not self.ended
        for placed in self.best(others):
            self.found.others.append(self.levelled(placed) if self.uneven else placed)
        return self.found

    def fit(self, root: tuple[Item, ...]) -> None:
        """Look for a placement within memory although time is up: a moment, in which nothing is made faster."""
        for order in self.orders(root):
            placed = self.problem.improved(self.problem.greedy(root, order), most=4 * len(root))
            if placed.score[0] and self.uneven:
                placed = fill(self.problem, placed, lambda: True)
            self.take(placed)
            if placed.score[0] == 0:
                return

    def states(self) -> int:
        """Return how many states were placed: that without cuts, and all others."""
        return 1 + len(self.memo)

    def best(self, count: int) -> list[Placed]:
        """Return the best few states of the beam within memory."""
        fitting = [placed for placed in self.memo.values() if placed.score[0] == 0]
        return sorted(fitting, key=lambda placed: placed.score)[:count]

    def take(self, placed: Placed) -> None:
        """Keep a placement if it is the best so far."""
        if self.found is None or placed.score < self.found.placed.score:
            curve = [] if self.found is None else self.found.curve
            curve.append((self.now() - self.began, *placed.score))
            self.found = SearchResult(placed, curve=curve)

    def key(self, items: Sequence[Item]) -> frozenset[Piece]:
        """Identify a state by the pieces of cut tables, whatever way led to it."""
        return frozenset(item[0] for item in items if len(item) == 1 and item not in self.whole)

    def orders(self, items: tuple[Item, ...]) -> list[np.ndarray]:
        compute, exchange, nbytes, *_ = self.problem.arrays(items)
        ms = compute + exchange
        bound = self.problem.ranks.bytes_of.sum() < 4 * nbytes.sum()
        weights = MEMORY_WEIGHTS if bound else MEMORY_WEIGHTS[:1]
        share = nbytes / nbytes.sum() * ms.sum()
        return [np.argsort(-(ms + weight * share), kind="stable") for weight in weights]

    def placed_anew(self, items: tuple[Item, ...]) -> Placed:
        best = None
        for order in self.orders(items):
            placed = self.problem.improved(self.problem.greedy(items, order), clock=self.late)
            if best is None or placed.score < best.score:
                best = placed
            if self.late():
                break
        assert best is not None
        return best

    # Cuts in halves

    def coarse(self, root: tuple[Item, ...]) -> list[Placed]:
        """Return starts whose large items are already cut."""
        problem, placed = self.problem, []
        ranks = problem.ranks
        compute, exchange, *_ = problem.arrays(root)
        mean = float(compute.sum() / sum(ranks.speeds) + exchange.sum() / sum(ranks.links))
        for part in COARSE:
            items = list[Item]()
            rest = list(root)
            while rest:
                item = rest.pop()
                each = self.ms(item)
                pairs = problem.parted(item) if each > part * mean and self.allowed([*items, *rest, item], item) else []
                pair = min(pairs, key=lambda pair: self.ms(pair), default=None)
                if pair is None or max(self.ms(pair[:1]), self.ms(pair[1:])) > WORTH * each:
                    items.append(item)
                    continue
                rest += [(piece,) for piece in pair]
            state = tuple(sorted(items))
            if len(items) > len(root) and self.key(state) not in self.memo and not self.late(self.beam_ends):
                self.memo[self.key(state)] = made = self.placed_anew(state)
                self.take(made)
                placed.append(made)
        return placed

    def ms(self, pieces: Sequence[Piece]) -> float:
        """Return the milliseconds of pieces together, without any factor."""
        return sum(sum(self.problem.cost(piece)[:2]) for piece in pieces)

    def allowed(self, items: Sequence[Item], item: Item) -> bool:
        """Return whether the table of an item may have one more piece."""
        table = item[0].table
        return self.most_pieces is None or sum(of[0].table == table for of in items) < self.most_pieces

    def beam(self, states: list[Placed]) -> None:
        best, waited = min(state.score for state in states), 0
        width = max(WIDTH, min(WIDEST, TOGETHER // len(states[0].items) ** 2))
        while waited < PATIENCE and not self.late(self.beam_ends):
            children = list[Placed]()
            for state in states:
                key = self.key(state.items)
                for item, pair in self.cuts(state):
                    if self.late(self.beam_ends):
                        break
                    child = self.child(state, key, item, pair)
                    if child is not None:
                        self.take(child)
                        children.append(child)
            if not children:
                return
            states = sorted([*states, *children] if waited == 0 else children, key=lambda placed: placed.score)[:width]
            gained = states[0].score < (best[0], best[1] * (1 - _LEAST_GAIN))
            best, waited = min(best, states[0].score), 0 if gained else waited + 1

    def cuts(self, state: Placed) -> list[tuple[int, tuple[Piece, Piece]]]:
        """Return items to cut, and how: of the busiest rank, of the one most over its cap, and the largest anywhere."""
        problem = self.problem
        compute, exchange, nbytes, *_ = problem.arrays(state.items)
        ms = compute + exchange
        over = state.used - state.caps
        picked = list[int]()
        most = MORE_CANDIDATES if len(problem.root()) <= FEW else CANDIDATES

        def pick(sizes: np.ndarray, which: np.ndarray, most: int) -> None:
            order = np.argsort(-np.where(which, sizes, -1), kind="stable")
            may = [i for i in order.tolist() if which[i] and i not in picked and problem.ways(state.items[i])]
            picked.extend(may[:most])

        if over.max() > 0:
            pick(nbytes, state.at == over.argmax(), most // 3)
        pick(ms, state.at == state.load.argmax(), most // 2)
        pick(ms, np.ones(len(ms), bool), most - len(picked))
        return [
            (i, pair)
            for i in picked
            if self.allowed(state.items, state.items[i])
            for pair in problem.parted(state.items[i])
        ]

    def child(self, state: Placed, key: frozenset[Piece], item: int, pair: tuple[Piece, Piece]) -> Placed | None:
        """Return a state with one more cut, or None if that state is known. `key` is the key of `state`."""
        problem = self.problem
        key = key - {state.items[item][0]} | set(pair)
        if key in self.memo:
            return None
        items = problem.with_cut(state.items, item, pair)
        at = np.delete(state.at, item)
        warm = problem.at(items, np.concatenate([at, [state.at[item], state.load.argmin()]]))
        best = problem.improved(warm, clock=self.late)
        if len(items) <= SMALL:
            best = min(best, self.placed_anew(items), key=lambda placed: placed.score)
        if len(items) <= TINY:
            best = self.shaken(best, TINY_KICKS)
        self.memo[key] = best
        return best

    # The end

    def levelled(self, placed: Placed) -> Placed:
        """Return the placement with cuts anywhere."""
        return level(self.problem, tidied(self.problem, placed), self.late)

    def shaken(self, kept: Placed, kicks: int, uneven: bool = False) -> Placed:
        """Move random items, then move and swap again, and return the best; `uneven` makes cuts anywhere as well."""
        state = np.uint64(self.seed)
        arrays = self.problem.arrays(kept.items)
        for kick in range(kicks):
            if self.late():
                break
            at, load, used = kept.at.copy(), kept.load.copy(), kept.used.copy()
            args: Any = (state, 2 + kick % 3, *arrays[:-1], at, load, used)
            with np.errstate(over="ignore"):
                state = np.uint64(balance.shake(*args))
            after = self.problem.improved(Placed(kept.items, at, load, used, kept.caps), clock=self.late)
            if uneven and after.score[0] == 0 and after.score[1] < kept.score[1] * WORTH_LEVELLING:
                after = self.levelled(after)
            if after.score < kept.score:
                kept, arrays = after, self.problem.arrays(after.items)
        return kept
