"""The search for a plan that TorchRec can run: a problem of tables, the memory of ranks, and costs, in which the sum of
bytes over the caps counts first, then the time of the busiest rank; and placements of pieces, made by compiled loops.

The search chooses which tables are cut by rows, evenly over all ranks; the others stay whole or are cut by columns, by a
beam over halvings, each of whose states is placed greedily and then improved."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from skirl.placement.costs import SUMS, Costs
from skirl.placement.spec import MULTIPLE, Piece, TableSpec, blocks, canonical, halves, plan_of, whole
from skirl.tools.jit import kernel
from skirl.tools.units import size
from skirl.train.placed import Plan

EPS = 1e-9
"""The least that a change has to gain, as a share of the busiest rank's time: less is rounding."""


@kernel
def place_greedily(order, compute, exchange, nbytes, caps, at, load, used):
    """Put each item of `order` on the least busy rank that has room, or else on the one that is then least over.

    Item i has compute[i] and exchange[i] in ms, and nbytes[i]; rank r has room for caps[r] bytes. Out: `at`, the rank of
    each item; the `load` in ms and `used` bytes of each rank grow.
    """
    for i in order:
        best, best_load, best_over = -1, 0.0, 0
        for r in range(len(caps)):
            over = max(0, used[r] + nbytes[i] - caps[r])
            busy = load[r] + compute[i] + exchange[i]
            if best < 0 or over < best_over or (over == best_over and busy < best_load):
                best, best_load, best_over = r, busy, over
        at[i] = best
        load[best] = best_load
        used[best] += nbytes[i]


@kernel
def _over(used, cap):
    return max(0, used - cap)


@kernel
def move_and_swap(compute, exchange, nbytes, slow, caps, at, load, used, most):
    """Move or swap items while that reduces the bytes over the caps or the busiest rank's time. Return how often.

    Each change, of at most `most`, is the best one for a single rank: the one most over its cap, or else the busiest.
    """
    ranks, done = len(caps), 0
    while done < most:
        worst, most_over = np.int64(-1), np.int64(0)  # no literals: `_change` would be compiled again for each
        for r in range(ranks):
            over = _over(used[r], caps[r])
            if over > most_over:
                worst, most_over = r, over
        tight = worst >= 0
        if not tight:
            worst = np.argmax(load)
        changed = _change(worst, tight, compute, exchange, nbytes, slow, caps, at, load, used)
        if not changed and tight:  # the bytes over cannot shrink; the busiest rank's time still may
            worst = np.argmax(load)
            changed = _change(worst, np.bool_(False), compute, exchange, nbytes, slow, caps, at, load, used)
        if not changed:
            break
        done += 1
    return done


@kernel
def _change(b, tight, compute, exchange, nbytes, slow, caps, at, load, used):
    """Make the best move or swap of an item of rank b, if it gains. Return whether one was made."""
    best_i, best_j, best_r = np.int64(-1), np.int64(-1), np.int64(-1)  # as above, for `_put`
    best_over, best_busy = 0, load[b] * (1 - EPS)
    over_b = _over(used[b], caps[b])
    if tight:
        best_over, best_busy = -1, np.inf  # the bytes over have to become fewer
    n, ranks = len(at), len(caps)
    for i in range(n):
        if at[i] != b:
            continue
        ib = compute[i] * slow[b] + exchange[i]
        left_over = _over(used[b] - nbytes[i], caps[b]) - over_b
        for r in range(ranks):
            if r == b:
                continue
            over = left_over + _over(used[r] + nbytes[i], caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            busy = max(load[b] - ib, load[r] + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, -1, r, over, busy
        for j in range(n):
            r = at[j]
            if r == b:
                continue
            more = nbytes[j] - nbytes[i]
            over = _over(used[b] + more, caps[b]) - over_b + _over(used[r] - more, caps[r]) - _over(used[r], caps[r])
            if over > best_over:
                continue
            jb = compute[j] * slow[b] + exchange[j]
            jr = compute[j] * slow[r] + exchange[j]
            busy = max(load[b] - ib + jb, load[r] - jr + compute[i] * slow[r] + exchange[i])
            if over < best_over or busy < best_busy:
                if not tight and busy >= load[b] * (1 - EPS):
                    continue
                best_i, best_j, best_r, best_over, best_busy = i, j, r, over, busy
    if best_i < 0:
        return False
    _put(best_i, best_r, compute, exchange, nbytes, slow, at, load, used)
    if best_j >= 0:
        _put(best_j, b, compute, exchange, nbytes, slow, at, load, used)
    return True


@kernel
def _put(i, r, compute, exchange, nbytes, slow, at, load, used):
    before = at[i]
    load[before] -= compute[i] * slow[before] + exchange[i]
    used[before] -= nbytes[i]
    at[i] = r
    load[r] += compute[i] * slow[r] + exchange[i]
    used[r] += nbytes[i]


UNBOUND = 1 << 52  # bytes of a rank without a limit
_CHANGES = 256  # moves and swaps between two looks at the clock
_SETTLED = 3  # most rounds of moves and swaps, where these change what a rank's parts cost together


@dataclass
class Placed:
    """A placement: the rank `at` of each piece, and the milliseconds, bytes and most bytes of each rank.

    `slow` is the factor of each rank's computing that accounts for its pieces being together.
    """

    items: tuple[Piece, ...]
    at: np.ndarray
    load: np.ndarray
    used: np.ndarray
    caps: np.ndarray
    slow: np.ndarray

    @property
    def over(self) -> np.ndarray:
        return np.maximum(self.used - self.caps, 0)

    @cached_property
    def score(self) -> tuple[int, float]:
        """Bytes over the caps, then milliseconds of the busiest rank: less is better."""
        return int(self.over.sum()), float(self.load.max())

    def pieces(self, rank: int) -> list[Piece]:
        return [self.items[n] for n in np.flatnonzero(self.at == rank).tolist()]


@dataclass
class Problem:
    """A placement problem: tables in their canonical order, bytes that each rank may hold, costs, and how to cut."""

    specs: Sequence[TableSpec]
    caps: tuple[int, ...]
    costs: Costs
    by_rows_cut: frozenset[int] = frozenset()
    """Tables that are cut by rows, whose blocks stay at their ranks; the others are to be placed."""
    blocks: np.ndarray = field(default_factory=lambda: np.zeros((3 + SUMS, 0)))
    """Compute ms, exchange ms, bytes and sums for a net of each rank's blocks of these: [3 + SUMS, ranks]."""
    _known: dict[tuple[int, int, int], tuple[float, float, int, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.caps or min(self.caps) <= 0:
            raise ValueError(f"the ranks hold {self.caps} bytes: give each more than 0")
        if len(self.caps) > (rows := sum(spec.rows for spec in self.specs)):
            raise ValueError(f"there are {len(self.caps)} ranks for {rows} rows: set fewer ranks than rows")
        self.bytes_of = np.array(self.caps, np.int64)
        if not self.blocks.size:
            self.blocks = np.zeros((3 + SUMS, len(self.caps)))
        self._ms, self._exchange, self._sums = self.blocks[0], self.blocks[1], self.blocks[3:].T.copy()
        for number, spec in enumerate(self.specs):  # raises before the search if a cost is missing
            self.cost(whole(number, spec))

    def cost(self, piece: Piece) -> tuple[float, float, int, np.ndarray]:
        """Milliseconds of computing and of exchange, bytes, and what is added to the sums of its rank, from which a net
        makes a factor."""
        key = piece.table, piece.rows, piece.dim  # all that they depend on
        found = self._known.get(key)
        if found is None:
            spec, rows, dim = self.specs[key[0]], key[1], key[2]
            compute, adds = self.costs.part(spec, rows, dim)
            found = self._known[key] = (compute, self.costs.exchange(spec, rows, dim), spec.nbytes(rows, dim), adds)
        return found

    def by_columns(self, spec: TableSpec) -> bool:
        return not spec.one_state and spec.split in ("any", "columns")

    def root(self) -> tuple[Piece, ...]:
        """Every table whole that is not cut by rows."""
        return tuple(whole(number, spec) for number, spec in enumerate(self.specs) if number not in self.by_rows_cut)

    def arrays(self, items: tuple[Piece, ...]) -> tuple[np.ndarray, ...]:
        """Compute and exchange ms, bytes and what is added to sums, each [items]."""
        costs = [self.cost(piece) for piece in items]
        compute, exchange, nbytes = np.array([cost[:3] for cost in costs]).reshape(-1, 3).T.copy()
        adds = np.array([cost[3] for cost in costs]).reshape(-1, SUMS)
        return compute, exchange, nbytes.astype(np.int64), adds

    def order(self, items: tuple[Piece, ...], weight: float) -> np.ndarray:
        """Order items by time and, with this weight, by their share of all bytes, the largest first."""
        compute, exchange, nbytes, _ = self.arrays(items)
        ms = compute + exchange
        held, busy = nbytes.sum() + self.blocks[2].sum(), ms.sum() + self.blocks[:2].sum()
        return np.argsort(-(ms + weight * (nbytes / held * busy)), kind="stable")

    def greedy(self, items: tuple[Piece, ...], order: np.ndarray) -> Placed:
        at, load, used = np.zeros(len(items), np.int64), self._ms + self._exchange, self.blocks[2].astype(np.int64)
        args: Any = (order, *self.arrays(items)[:3], self.bytes_of, at, load, used)
        place_greedily(*args)
        return self._together(items, at, used)

    def at(self, items: tuple[Piece, ...], at: np.ndarray) -> Placed:
        used = self.blocks[2].astype(np.int64)
        np.add.at(used, at, self.arrays(items)[2])
        return self._together(items, at, used)

    def improved(self, placed: Placed, clock: Callable[[], bool] = lambda: False) -> Placed:
        """Move and swap items as long as that gains. Repeat where moves change what parts cost together."""
        for _ in range(_SETTLED):
            after = self._moved(placed, clock)
            if self.costs.net is None:
                return after
            if after.score >= placed.score:
                break
            placed = after
        return placed

    def _moved(self, placed: Placed, clock: Callable[[], bool]) -> Placed:
        at, load, used = placed.at.copy(), placed.load.copy(), placed.used.copy()
        done = _CHANGES
        while done == _CHANGES and not clock():
            of = (*self.arrays(placed.items)[:3], placed.slow, self.bytes_of)
            args: Any = (*of, at, load, used, _CHANGES)
            done = move_and_swap(*args)
        return self._together(placed.items, at, used)

    def _together(self, items: tuple[Piece, ...], at: np.ndarray, used: np.ndarray) -> Placed:
        """By a net, the load of a rank is not the sum over its parts."""
        compute, exchange, _, adds = self.arrays(items)
        ranks, slow = len(self.caps), np.ones(len(self.caps))
        if self.costs.net is not None:
            sums = np.stack([np.bincount(at, column, minlength=ranks) for column in adds.T], axis=1)
            slow = self.costs.factors(sums + self._sums)
        load = np.bincount(at, compute * slow[at] + exchange, minlength=ranks) + self._ms * slow + self._exchange
        return Placed(items, at, load, used, self.bytes_of, slow)


BEST, FEW, TRIED = 4, 7, 40
"""Choices of tables to cut by rows that are searched in full; tables up to which every choice is tried; tables, longest
first, that are moved in and out of the best choice."""
COUNTS = (*range(1, 16), *(int(16 * 1.25**k) for k in range(40)))
"""Numbers of tables, the largest first, that are cut by rows together: every one at first, then fewer and fewer."""
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
    specs: Sequence[TableSpec], caps: tuple[int, ...], costs: Costs, *, seconds: float = 30.0,
    forced: Sequence[str] = (),
) -> tuple[Plan, SearchResult, Problem]:  # fmt: skip
    """Return a plan within memory, what the search found, and the problem that it searched.

    Tables named in `forced` have to be cut by rows. Raise a ValueError if no plan fits.
    """
    problem = Problem([specs[n] for n in canonical(specs)], caps, costs)
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
        root, best = rest.root(), list[tuple[int, float]]()
        for weight in (0.0, 2.0):
            greedy = rest.greedy(root, rest.order(root, weight))
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
            for count in sorted({min(len(order), n) for n in COUNTS}):
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
        held = sum(spec.nbytes(spec.rows, spec.dim) for spec in problem.specs)
        self.weights = MEMORY_WEIGHTS if problem.bytes_of.sum() < 4 * held else MEMORY_WEIGHTS[:1]
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

    def placed_anew(self, items: tuple[Piece, ...]) -> Placed:
        best = None
        for weight in self.weights:
            greedy = self.problem.greedy(items, self.problem.order(items, weight))
            placed = self.problem.improved(greedy, clock=self.late)
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
