"""The search for a plan that TorchRec can run. It chooses which tables are cut by rows, evenly over all ranks; the others
stay whole or are cut by columns, by a beam over halvings, each of whose states is placed greedily and then improved."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skirl.placement.costs import SUMS, Costs
from skirl.placement.problem import Columns, Placed, Problem
from skirl.placement.spec import MULTIPLE, Piece, TableSpec, blocks, canonical, halves, plan_of, whole
from skirl.tools.units import size
from skirl.train.placed import Plan

BEST, FEW, TRIED = 4, 7, 40
"""Choices of tables to cut by rows that are searched in full; tables up to which every choice is tried; tables, longest
first, that are moved in and out of the best choice."""
QUICK, SPARED = 0.5, 0.05
"""Shares of the time: what the choices may take, and what is left for putting the plan together."""
WIDTH, CANDIDATES = 3, 10
"""States that a beam keeps, and items of a state that are cut."""
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
    """The best placement, the seconds that the search took, and the next best ones."""

    placed: Placed
    seconds: float = 0.0
    others: list[Placed] = field(default_factory=list)


def plan_tables(
    specs: Sequence[TableSpec], caps: tuple[int, ...], costs: Costs, *, columns: Columns = "exact", seconds: float = 30.0,
    forced: Sequence[str] = (),
) -> tuple[Plan, SearchResult, Problem]:  # fmt: skip
    """Return a plan within memory, what the search found, and the problem that it searched.

    Tables named in `forced` have to be cut by rows. Raise a ValueError if no plan fits.
    """
    problem = Problem([specs[n] for n in canonical(specs)], caps, costs, columns)
    held, room = sum(spec.nbytes(spec.rows, spec.dim) for spec in specs), sum(caps)
    who = "ranks" if costs.sent is None else "trainers"
    if held > room:
        raise ValueError(
            f"the tables take {size(held)} with their optimizer state, and the {who} have {size(room)}, {size(held - room)} "
            f"too little: give each more memory, or take {math.ceil(len(caps) * held / room)} of them"
        )
    numbers = [n for n, spec in enumerate(problem.specs) if spec.name in set(forced)]
    found = search(problem, forced=numbers, seconds=seconds)
    over = found.placed.over
    if over.max() > 0:
        raise ValueError(
            f"found no plan that fits: {who[:-1]} {over.argmax()} exceeds its memory by {size(int(over.max()))}, since a "
            f"table is whole at one of the {who}, or cut over them: give it more memory, or take more {who}"
        )
    return plan_of(specs, found.placed), found, problem


def search(problem: Problem, *, forced: Iterable[int] = (), seconds: float = 30.0) -> SearchResult:
    """Search for a placement in which each table is whole, cut by columns, or cut into `blocks` of rows at the ranks."""
    one = Problem(problem.specs[:1], problem.caps[:1], problem.costs)
    one.improved(one.greedy(one.root(), np.zeros(1, np.int64)))  # compiles the loops before the time starts
    return _RowCuts(problem, frozenset(forced), seconds).run()


def ways_ms(problem: Problem, table: int, pieces: Sequence[Piece]) -> dict[str, float]:
    """Return what a table takes each rank if its rows are spread, one rank if it is whole there, and at most a rank as
    these pieces of it."""
    spec = problem.specs[table]
    ways = {
        "rows_ms": [Piece(table, 0, -(-spec.rows // len(problem.caps)), 0, spec.dim)],
        "whole_ms": [whole(table, spec)],
        "planned_ms": pieces,
    }
    return {name: max(sum(problem.cost(of)[:2]) for of in each) for name, each in ways.items()}


@dataclass
class _RowCuts:
    problem: Problem
    forced: frozenset[int]
    seconds: float
    tried: dict[frozenset[int], tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        ranks, specs = len(self.problem.caps), self.problem.specs
        may = (n for n, spec in enumerate(specs) if spec.rows >= ranks and spec.split in ("any", "rows"))
        self.may = [n for n in may if n not in self.forced]
        self.blocks = {n: self.of_ranks(n) for n in (*self.forced, *self.may)}

    def of_ranks(self, table: int) -> np.ndarray:
        """Compute ms, exchange ms, bytes and sums for a net of each rank's block of a table: [3 + SUMS, ranks]."""
        spec, ranks = self.problem.specs[table], len(self.problem.caps)
        out = np.zeros((3 + SUMS, ranks))
        for rank, (begin, end) in enumerate(blocks(spec.rows, ranks)):
            if begin < end:
                *of, adds = self.problem.cost(Piece(table, begin, end, 0, spec.dim))
                out[:, rank] = (*of, *adds)
        return out

    def late(self, share: float) -> bool:
        return time.perf_counter() - self.began >= self.seconds * share

    def rest(self, cut: frozenset[int]) -> Problem:
        """The problem that is left when these tables are cut."""
        none = np.zeros((3 + SUMS, len(self.problem.caps)))
        return replace(self.problem, by_rows_cut=cut, blocks=sum((self.blocks[n] for n in sorted(cut)), none))

    def run(self) -> SearchResult:
        self.choose()
        sets = sorted(self.tried, key=lambda cut: (self.tried[cut], sorted(cut)))[:BEST]
        found = list[Placed]()
        for number, cut in enumerate(sets):
            left = max(0.0, (1 - SPARED) * self.seconds - (time.perf_counter() - self.began)) / (len(sets) - number)
            if found and left == 0.0:
                break
            rest = self.rest(cut)
            found.append(_with_blocks(rest, _side_by_side(rest, _Beam(rest, left).run())))
        best, *others = sorted(found, key=lambda placed: placed.score)
        fitting = [placed for placed in others if placed.score[0] == 0]
        return SearchResult(best, time.perf_counter() - self.began, fitting)

    def rate(self, cut: frozenset[int]) -> None:
        """Score a choice of tables to cut, with the others whole, by moves and swaps alone."""
        if cut in self.tried:
            return
        rest = self.rest(cut)
        root = rest.root()
        compute, exchange, nbytes, *_ = rest.arrays(root)
        ms, best = compute + exchange, list[tuple[int, float]]()
        held, busy = nbytes.sum() + rest.blocks[2].sum(), ms.sum() + rest.blocks[:2].sum()
        for sizes in (ms, nbytes / held * busy + ms / 2):
            greedy = rest.greedy(root, np.argsort(-sizes, kind="stable"))
            best.append(rest.improved(greedy, clock=lambda: self.late(QUICK)).score)
            if best[-1][0] == 0:
                break
        self.tried[cut] = min(best)

    def choose(self) -> None:
        """Try every choice of a few tables.

        Of many, try the longest and the largest ones, every choice of a few largest while none fits, then put single ones
        in and out as long as that gains.
        """
        cost = [self.problem.cost(whole(n, spec)) for n, spec in enumerate(self.problem.specs)]
        self.rate(self.forced)
        self.rate(self.forced | frozenset(self.may))  # it fits wherever all tables do
        by_ms = sorted(self.may, key=lambda n: -(cost[n][0] + cost[n][1]))
        by_bytes = sorted(self.may, key=lambda n: -cost[n][2])
        if len(self.may) <= FEW:
            return self.every(by_bytes)
        for order in (by_ms, by_bytes):
            for count in _counts(len(order)):
                if self.late(QUICK / 2):
                    break
                self.rate(self.forced | frozenset(order[:count]))
        if min(self.tried.values())[0]:
            self.every(by_bytes[:FEW])
        best = min(self.tried, key=lambda cut: (self.tried[cut], sorted(cut)))
        while not self.late(QUICK):
            before = self.tried[best]
            for n in by_ms[:TRIED]:
                if self.late(QUICK):
                    break
                self.rate(best ^ {n})
            best = min(self.tried, key=lambda cut: (self.tried[cut], sorted(cut)))
            if self.tried[best] >= before:
                break

    def every(self, tables: Sequence[int]) -> None:
        for n in range(1 << len(tables)):
            if self.late(QUICK):
                break
            self.rate(self.forced | {table for k, table in enumerate(tables) if n >> k & 1})


def _counts(tables: int) -> Sequence[int]:
    """Numbers of tables to try: every one up to 16, then fewer and fewer."""
    counts = [*range(1, min(tables, 16) + 1)]
    while counts and counts[-1] < tables:
        counts.append(min(tables, counts[-1] + max(1, counts[-1] // 4)))
    return counts


def _side_by_side(problem: Problem, placed: Placed) -> Placed:
    """The placement with each rank's columns of a table side by side, a width of no multiple of 4 at the end.

    TorchRec cannot run parts of one table with different widths at one rank.
    """
    columns: dict[int, dict[int, int]] = {}
    items, at = list[Piece](), list[int]()
    for piece, rank in zip(placed.items, placed.at.tolist(), strict=True):
        if piece.dim < problem.specs[piece.table].dim:
            of = columns.setdefault(piece.table, {})
            of[rank] = of.get(rank, 0) + piece.dim
        else:
            items.append(piece)
            at.append(rank)
    for table, by_rank in columns.items():
        end = 0
        for rank, width in sorted(by_rank.items(), key=lambda one: (one[1] % MULTIPLE > 0, one[0])):
            items.append(whole(table, problem.specs[table])._replace(col=end, col_end=end + width))
            at.append(rank)
            end += width
    return problem.at(tuple(items), np.array(at, np.int64))


def _with_blocks(problem: Problem, placed: Placed) -> Placed:
    """The placement with the blocks of tables that are cut by rows."""
    items, at = [*placed.items], placed.at.tolist()
    for table in sorted(problem.by_rows_cut):
        spec = problem.specs[table]
        for rank, (begin, end) in enumerate(blocks(spec.rows, len(problem.caps))):
            if begin < end:
                items.append(Piece(table, begin, end, 0, spec.dim))
                at.append(rank)
    return replace(placed, items=tuple(items), at=np.array(at, np.int64))


# Cuts by columns


class _Beam:
    """Searches for a placement of tables, whole or cut by columns, whose busiest rank is hardly busier than it has to be.

    The plan of a search that ends in time depends only on the problem.
    """

    def __init__(self, problem: Problem, seconds: float) -> None:
        self.problem = problem
        self.began, self.seconds = time.perf_counter(), seconds
        self.memo: dict[frozenset[Piece], Placed] = {}
        self.best: Placed | None = None
        self.root = problem.root()
        self.whole = set(self.root)
        self.may = {n for n, spec in enumerate(problem.specs) if problem.by_columns(spec)}

    def late(self, share: float = 1.0) -> bool:
        return time.perf_counter() - self.began >= self.seconds * share

    def run(self) -> Placed:
        first = self.placed_anew(self.root)
        self.take(first)
        if any(piece.table in self.may for piece in self.root):
            self.beam([first])
        assert self.best is not None
        return self.best

    def take(self, placed: Placed) -> None:
        if self.best is None or placed.score < self.best.score:
            self.best = placed

    def key(self, items: Sequence[Piece]) -> frozenset[Piece]:
        """The pieces of cut tables identify a state, whatever way led to it."""
        return frozenset(piece for piece in items if piece not in self.whole)

    def orders(self, items: tuple[Piece, ...]) -> list[np.ndarray]:
        compute, exchange, nbytes, *_ = self.problem.arrays(items)
        ms = compute + exchange
        held, busy = nbytes.sum() + self.problem.blocks[2].sum(), ms.sum() + self.problem.blocks[:2].sum()
        weights = MEMORY_WEIGHTS if self.problem.bytes_of.sum() < 4 * held else MEMORY_WEIGHTS[:1]
        share = nbytes / held * busy
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
            states = sorted([*states, *children] if waited == 0 else children, key=lambda placed: placed.score)[:WIDTH]
            gained = states[0].score < (best[0], best[1] * (1 - _LEAST_GAIN))
            best, waited = min(best, states[0].score), 0 if gained else waited + 1

    def largest(self, state: Placed) -> list[int]:
        """Items to cut: of the busiest rank, of the one most over its cap, and the largest anywhere."""
        compute, exchange, nbytes, *_ = self.problem.arrays(state.items)
        ms = compute + exchange
        over, picked = state.over, list[int]()

        def pick(sizes: np.ndarray, which: np.ndarray, most: int) -> None:
            order = np.argsort(-np.where(which, sizes, -1), kind="stable")
            may = [i for i in order.tolist() if which[i] and i not in picked and state.items[i].table in self.may]
            picked.extend(may[:most])

        if over.max() > 0:
            pick(nbytes, state.at == over.argmax(), CANDIDATES // 3)
        pick(ms, state.at == state.load.argmax(), CANDIDATES // 2)
        pick(ms, np.ones(len(ms), bool), CANDIDATES - len(picked))
        return picked

    def child(self, state: Placed, key: frozenset[Piece], item: int) -> Placed | None:
        """A state with one item halved, or None if that state is known. `key` is the key of `state`."""
        problem, pair = self.problem, halves(state.items[item])
        if pair is None:
            return None
        key = key - {state.items[item]} | set(pair)
        if key in self.memo:
            return None
        items = (*state.items[:item], *state.items[item + 1 :], *pair)
        at = np.delete(state.at, item)
        start = problem.at(items, np.concatenate([at, [state.at[item], state.load.argmin()]]))
        best = problem.improved(start, clock=self.late)
        if len(items) <= SMALL:
            best = min(best, self.placed_anew(items), key=lambda placed: placed.score)
        self.memo[key] = best
        return best
