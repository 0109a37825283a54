"""The search where tables are cut by rows only evenly over all ranks, as TorchRec cuts them: which of them, and the rest
whole or by columns.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skirl.placement.tables.pieces import Piece, whole
from skirl.placement.tables.problem import Item, Placed, Problem, canonical
from skirl.placement.tables.search import Found, search
from skirl.placement.tables.spec import TableSpec

BEST = 4
"""Choices of tables to cut that are searched in full."""
FEW = 7
"""Tables of which every choice is tried."""
TRIED = 40
"""Tables, the longest first, that are put in and out of the best choice."""
QUICK = 0.5
"""Of the time: what the choices may take."""


def blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Rows of each rank: the same number for all but the last that have some.

    **Arguments**

    - `rows`, `ranks`: of the table, and how many.

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
) -> Found:
    """A placement of the same problem, in which a table is whole, or cut by columns, or has `blocks` of rows at the ranks.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `forced`: numbers of tables that have to be cut by rows.
    - `seconds`: after which it returns the best so far.
    - `seed`: of what is left to chance.
    - `now`: the clock.
    """
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

    def late(self, share: float) -> bool:
        return self.now() - self.began >= self.seconds * share

    def run(self) -> Found:
        self.choose()
        sets = sorted(self.tried, key=lambda cut: (self.tried[cut], sorted(cut)))[:BEST]
        best: Found | None = None
        states, in_time, curve = len(self.tried), not self.late(QUICK), []
        for number, cut in enumerate(sets):
            left = max(0.0, self.seconds - (self.now() - self.began)) / (len(sets) - number)
            if best is not None and left == 0.0:
                in_time = False
                break
            began, part = self.now() - self.began, _Part(self.problem, cut)
            found = search(part.problem, seconds=left, seed=self.seed, now=self.now)
            states, in_time = states + found.states, in_time and found.in_time
            curve += [(began + at, over, ms) for at, over, ms in found.curve]
            placed = part.whole_of(found.placed)
            if best is None or placed.score < best.placed.score:
                best = Found(placed)
        assert best is not None
        best.seconds, best.states, best.in_time = self.now() - self.began, states, in_time
        best.curve = [at for n, at in enumerate(curve) if n == 0 or at[1:] < min(of[1:] for of in curve[:n])]
        return best

    def rate(self, cut: frozenset[int]) -> tuple[int, float]:
        """The score of whole tables beside those that are cut, by moves and swaps alone."""
        if cut not in self.tried:
            problem = _Part(self.problem, cut).problem
            root = problem.root()
            compute, exchange, nbytes, *_ = problem.arrays(root)
            ms = compute + exchange
            best = None
            for sizes in (ms, nbytes / nbytes.sum() * ms.sum() + ms / 2):
                placed = problem.improved(problem.greedy(root, np.argsort(-sizes, kind="stable")))
                best = placed.score if best is None else min(best, placed.score)
                if best[0] == 0:
                    break
            assert best is not None
            self.tried[cut] = best
        return self.tried[cut]

    def choose(self) -> None:
        """The longest tables, the largest ones, then single ones in and out as long as that gains."""
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
    """So many of them: each number to 16, then fewer and fewer."""
    counts = [*range(1, min(tables, 16) + 1)]
    while counts and counts[-1] < tables:
        counts.append(min(tables, counts[-1] + max(1, counts[-1] // 4)))
    return counts


class _Part:
    """The problem that is left when some tables are cut: their blocks are pinned tables."""

    def __init__(self, problem: Problem, cut: frozenset[int]) -> None:
        self.of = problem
        specs, parts = list[TableSpec](), list[Piece]()
        for n, spec in enumerate(problem.specs):
            if n not in cut:
                specs.append(spec)
                parts.append(whole(n, spec))
                continue
            for rank, (begin, end) in enumerate(blocks(spec.rows, len(problem.ranks.caps))):
                if begin < end:
                    specs.append(block(spec, rank, begin, end))
                    parts.append(Piece(n, begin, end, 0, spec.dim))
        order = canonical(specs)
        self.parts = [parts[n] for n in order]
        self.problem = Problem([specs[n] for n in order], problem.ranks, problem.costs, problem.columns, rows=False)

    def whole_of(self, placed: Placed) -> Placed:
        """The placement of the problem itself that one of this part is, with the columns that a rank has of a table side by
        side: TorchRec runs no parts of unlike widths of a table at one rank."""
        columns: dict[int, dict[int, int]] = {}
        items, at = list[Item](), list[int]()
        for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
            parts = [self.parts[piece.table] for piece in item]
            if len(item) == 1 and item[0].dim < parts[0].dim:
                of = columns.setdefault(item[0].table, {})
                of[rank] = of.get(rank, 0) + item[0].dim
                continue
            items.append(tuple(parts))
            at.append(rank)
        for table, by_rank in columns.items():
            end = 0
            for rank, width in sorted(by_rank.items()):
                items.append((self.parts[table]._replace(col=end, col_end=end + width),))
                at.append(rank)
                end += width
        return self.of.at(tuple(items), np.array(at, np.int64))


def block(spec: TableSpec, rank: int, begin: int, end: int) -> TableSpec:
    """Some rows of a table as a table that has to be at a rank.

    **Arguments**

    - `spec`: the table.
    - `rank`: where.
    - `begin`, `end`: of its rows.
    """
    part = (end - begin) / spec.rows
    ids = spec.ids * part
    return replace(
        spec, name=f"{spec.name}\0{rank}", rows=end - begin, ids=ids, distinct=min(spec.distinct * part, ids, end - begin),
        rank=rank, group=None, split="no",
    )  # fmt: skip
