"""The search in which rows are cut only evenly over all ranks, as TorchRec cuts them.

It chooses the tables to cut by rows; the others stay whole or are cut by columns.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from skirl.placement.tables.nets import SUMS
from skirl.placement.tables.pieces import Piece, whole
from skirl.placement.tables.problem import Item, Placed, Problem
from skirl.placement.tables.search import SearchResult, search, warm
from skirl.placement.tables.spec import TableSpec

BEST = 4
"""Choices of tables to cut by rows that are searched in full."""
FEW = 7
"""Up to this many tables, every choice is tried."""
TRIED = 40
"""Tables, longest first, that are moved in and out of the best choice."""
QUICK, SPARED = 0.5, 0.05
"""Shares of the time: what the choices may take, and what is left for putting the plan together."""


def blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Return the rows of each rank: equally many for all but the last that has some.

    **Arguments**

    - `rows`, `ranks`: rows of the table, and number of ranks.

    >>> blocks(10, 4), blocks(5, 4)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], [(0, 2), (2, 4), (4, 5), (5, 5)])
    """
    size = -(-rows // ranks)
    return [(min(rows, r * size), min(rows, (r + 1) * size)) for r in range(ranks)]


def search_evenly(
    problem: Problem,
    *,
    forced: Iterable[int] = (),
    seconds: float = 30.0,
    seed: int = 0,
    now: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """Search for a placement in which each table is whole, cut by columns, or cut into `blocks` of rows at the ranks.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `forced`: numbers of tables that have to be cut by rows.
    - `seconds`: time after which the best so far is returned.
    - `seed`: the random seed.
    - `now`: the clock.
    """
    warm()
    return _Evenly(problem, frozenset(forced), seconds, seed, now).run()


@dataclass
class _Evenly:
    problem: Problem
    forced: frozenset[int]
    seconds: float
    seed: int
    now: Callable[[], float]
    tried: dict[frozenset[int], tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.began = self.now()
        ranks = len(self.problem.ranks.caps)
        self.may = [
            n
            for n, spec in enumerate(self.problem.specs)
            if n not in self.forced and spec.rows >= ranks and "rows" in self.problem.ways((whole(n, spec),))
        ]
        self.blocks = _Blocks(self.problem, [*self.forced, *self.may])

    def late(self, share: float) -> bool:
        return self.now() - self.began >= self.seconds * share

    def run(self) -> SearchResult:
        self.choose()
        sets = sorted(self.tried, key=lambda cut: (self.tried[cut], sorted(cut)))[:BEST]
        best: tuple[_Rest, Placed] | None = None
        states, in_time, curve = len(self.tried), not self.late(QUICK), []
        for number, cut in enumerate(sets):
            left = max(0.0, (1 - SPARED) * self.seconds - (self.now() - self.began)) / (len(sets) - number)
            if best is not None and left == 0.0:
                in_time = False
                break
            began, rest = self.now() - self.began, _Rest(self.problem, cut, self.blocks)
            found = search(rest, seconds=left, seed=self.seed, now=self.now)
            states, in_time = states + found.states, in_time and found.in_time
            curve += [(began + at, over, ms) for at, over, ms in found.curve]
            placed = rest.side_by_side(found.placed)
            if best is None or placed.score < best[1].score:
                best = rest, placed
        assert best is not None
        found = SearchResult(best[0].whole_of(best[1]), self.now() - self.began, states, in_time)
        found.curve = [at for n, at in enumerate(curve) if n == 0 or at[1:] < min(of[1:] for of in curve[:n])]
        return found

    def rate(self, cut: frozenset[int]) -> tuple[int, float]:
        """Score a choice of tables to cut, with the others whole, by moves and swaps alone."""
        if cut not in self.tried:
            rest = _Rest(self.problem, cut, self.blocks)
            root = rest.root()
            compute, exchange, nbytes, *_ = rest.arrays(root)
            ms = compute + exchange
            best = None
            for sizes in (ms, nbytes / nbytes.sum() * ms.sum() + ms / 2):
                greedy = rest.greedy(root, np.argsort(-sizes, kind="stable"))
                placed = rest.improved(greedy, clock=lambda: self.late(QUICK))
                best = placed.score if best is None else min(best, placed.score)
                if best[0] == 0:
                    break
            assert best is not None
            self.tried[cut] = best
        return self.tried[cut]

    def choose(self) -> None:
        """Try every choice of a few tables.

        Of many, try the longest and the largest ones, then put single ones in and out as long as that gains.
        """
        cost = [self.problem.cost(whole(n, spec)) for n, spec in enumerate(self.problem.specs)]
        self.rate(self.forced)
        self.rate(self.forced | frozenset(self.may))  # it fits wherever all tables do
        if len(self.may) <= FEW:
            for n in range(1 << len(self.may)):
                if self.late(QUICK):
                    break
                self.rate(self.forced | {table for k, table in enumerate(self.may) if n >> k & 1})
            return
        by_ms = sorted(self.may, key=lambda n: -(cost[n][0] + cost[n][1]))
        for order in (by_ms, sorted(self.may, key=lambda n: -cost[n][2])):
            for count in _counts(len(order)):
                if self.late(QUICK / 2):
                    break
                self.rate(self.forced | frozenset(order[:count]))
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


def _counts(tables: int) -> Sequence[int]:
    """Return the numbers of tables to try: every one up to 16, then fewer and fewer."""
    counts = [*range(1, min(tables, 16) + 1)]
    while counts and counts[-1] < tables:
        counts.append(min(tables, counts[-1] + max(1, counts[-1] // 4)))
    return counts


class _Blocks:
    """Costs of blocks at each rank, without a look at each: all blocks of a table but the last have the same rows.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `tables`: tables that may be cut.
    """

    def __init__(self, problem: Problem, tables: Iterable[int]) -> None:
        self.ranks, count = len(problem.ranks.caps), len(problem.specs)
        self.full, self.last = np.zeros((count, 3 + SUMS)), np.zeros((count, 3 + SUMS))
        self.of_full = np.zeros(count, np.int64)
        """For each table, the number of blocks with as many rows as a block may have."""
        for n in tables:
            spec = problem.specs[n]
            size = -(-spec.rows // self.ranks)
            self.of_full[n] = spec.rows // size
            for into, rows in ((self.full, size), (self.last, spec.rows % size)):
                if rows:
                    piece = Piece(n, 0, rows, 0, spec.dim)
                    into[n] = (*problem.cost(piece), *problem.adds(piece))

    def of(self, tables: Sequence[int]) -> np.ndarray:
        """Return the compute ms, exchange ms, bytes and sums for a net of each rank's blocks: [ranks, 3 + SUMS].

        **Arguments**

        - `tables`: tables that are cut.
        """
        full, last = (np.zeros((self.ranks + 1, 3 + SUMS)) for _ in range(2))
        np.add.at(full, self.of_full[tables], self.full[tables])
        np.add.at(last, self.of_full[tables], self.last[tables])
        return (
            np.cumsum(full[::-1], axis=0)[::-1][1:] + last[:-1]
        )  # rank r has a full block of each table with more than r of them


class _Rest(Problem):
    """The problem that is left when some tables are cut: a rank's blocks of them are one item, which stays there.

    **Arguments**

    - `of`: the whole problem.
    - `cut`: the tables that are cut.
    - `blocks`: costs of their blocks.
    """

    def __init__(self, of: Problem, cut: frozenset[int], blocks: _Blocks) -> None:
        self.of, self.cut, tables = of, cut, len(of.specs)
        known, adds, stay = dict(of._known), dict(of._adds), list[TableSpec]()
        for rank, (compute, exchange, nbytes, *sums) in enumerate(blocks.of(sorted(cut)).tolist()):
            if nbytes:
                key = (tables + len(stay), 1, 1)
                known[key], adds[key] = (compute, exchange, int(nbytes)), np.array(sums)
                stay.append(TableSpec(f"\0{rank}", 1, 1, 1, 1.0, 1.0, (), of.specs[0].optimizer, rank, None, "no"))
        super().__init__([*of.specs, *stay], of.ranks, of.costs, of.columns, False, known, adds)

    def root(self) -> tuple[Item, ...]:
        """Return the tables that are not cut, and for each rank the item that stays there."""
        return tuple(item for item in super().root() if item[0].table not in self.cut)

    def side_by_side(self, placed: Placed) -> Placed:
        """Return the placement with each rank's columns of a table side by side.

        TorchRec cannot run parts of one table with different widths at one rank.
        """
        columns: dict[int, dict[int, int]] = {}
        items, at = list[Item](), list[int]()
        for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
            if len(item) == 1 and item[0].dim < self.specs[item[0].table].dim:
                of = columns.setdefault(item[0].table, {})
                of[rank] = of.get(rank, 0) + item[0].dim
                continue
            items.append(item)
            at.append(rank)
        for table, by_rank in columns.items():
            end = 0
            for rank, width in sorted(by_rank.items()):
                items.append((whole(table, self.specs[table])._replace(col=end, col_end=end + width),))
                at.append(rank)
                end += width
        return self.at(tuple(items), np.array(at, np.int64))

    def whole_of(self, placed: Placed) -> Placed:
        """Return the placement of the whole problem that this one stands for, with the blocks of cut tables."""
        tables = len(self.of.specs)
        kept = [n for n, item in enumerate(placed.items) if item[0].table < tables]
        items, at = [placed.items[n] for n in kept], [int(placed.at[n]) for n in kept]
        for table in sorted(self.cut):
            spec = self.of.specs[table]
            for rank, (begin, end) in enumerate(blocks(spec.rows, len(self.ranks.caps))):
                if begin < end:
                    items.append((Piece(table, begin, end, 0, spec.dim),))
                    at.append(rank)
        return Placed(tuple(items), np.array(at, np.int64), placed.load, placed.used, placed.caps, placed.slow)
