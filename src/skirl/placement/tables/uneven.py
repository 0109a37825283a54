"""Cuts anywhere: rows over a rank's memory go where there is room, and a busy rank gives rows or columns away."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from skirl.placement.tables.pieces import Piece, joined
from skirl.placement.tables.problem import Item, Placed, Problem
from skirl.placement.tables.spec import MULTIPLE

GAIN = 2e-4
"""Least gain of a cut, as a share of the busiest rank's time."""
CLOSE = 1e-5
"""Largest difference between two equally busy ranks, as a share of the busiest rank's time."""
TAKERS = 4
GIVEN = 8


def fill(problem: Problem, placed: Placed, late: Callable[[], bool]) -> Placed:
    """Cut rows off ranks that are over their memory, and give them to ranks that have room.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `placed`: a placement that is over some caps.
    - `late`: whether the time for moves is up; rows are made to fit all the same.
    """
    items, at, used = list(placed.items), placed.at.tolist(), placed.used.copy()
    for _ in range(4 * len(placed.caps) + len(items)):
        over, room = used - placed.caps, placed.caps - used
        giver, taker = int(over.argmax()), int(room.argmax())
        if over[giver] <= 0 or room[taker] <= 0:
            break
        best = None
        for i, item in enumerate(items):
            if at[i] != giver or "rows" not in problem.ways(item):
                continue
            piece = item[0]
            one = problem.cost(piece)[2] // piece.rows
            moved = min(-(-int(over[giver]) // one), int(room[taker]) // one, piece.rows)
            if moved <= 0:
                continue
            left = max(0, int(over[giver]) - moved * one)
            cost = (left, 0.0 if moved == piece.rows else problem.cost(piece)[1])
            if best is None or cost < best[0]:
                best = (cost, i, moved, one)
        if best is None:
            break
        _, i, moved, one = best
        piece = items[i][0]
        if moved == piece.rows:
            at[i] = taker
        else:
            stays, goes = piece.cut_rows(piece.rows - moved)
            items[i] = (stays,)
            items.append((goes,))
            at.append(taker)
        used[giver] -= moved * one
        used[taker] += moved * one
    return problem.improved(problem.at(tuple(items), np.array(at)), clock=late)


def tidied(problem: Problem, placed: Placed) -> Placed:
    """Join neighbouring pieces on one rank: less work, and not a byte more.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `placed`: the placement.
    """
    several = {table for table, n in _pieces_by_table(placed.items).items() if n > 1}
    if not several:
        return placed
    items, at = list[Item](), list[int]()
    loose: dict[tuple[int, int], list[Piece]] = {}
    for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
        if len(item) == 1 and item[0].table in several:
            loose.setdefault((rank, item[0].table), []).append(item[0])
        else:
            items.append(item)
            at.append(rank)
    for (rank, _), pieces in sorted(loose.items()):
        for piece in joined(pieces):
            items.append((piece,))
            at.append(rank)
    return placed if len(items) == len(placed.items) else problem.at(tuple(items), np.array(at))


def level(problem: Problem, placed: Placed, late: Callable[[], bool]) -> Placed:
    """Give rows or columns of the busiest rank to less busy ones, as long as that gains.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `placed`: the placement.
    - `late`: whether time is up.
    """
    while not late():
        given = _given(problem, placed)
        if given is None:
            return placed
        after = problem.improved(tidied(problem, given), clock=late)
        if after.score >= (placed.score[0], placed.score[1] * (1 - GAIN)):
            return min(placed, after, key=lambda of: of.score)
        placed = after
    return placed


def _given(problem: Problem, placed: Placed) -> Placed | None:
    """Return the placement after the best single gift of the busiest rank, or None."""
    giver = int(placed.load.argmax())
    mine = [i for i in np.flatnonzero(placed.at == giver).tolist() if problem.ways(placed.items[i])]
    mine.sort(key=lambda i: -sum(problem.cost(placed.items[i][0])[:2]))
    calm = [r for r in np.argsort(placed.load, kind="stable").tolist() if r != giver][:TAKERS]
    best: tuple[float, int, int, tuple[Piece, Piece]] | None = None
    for i in mine[:GIVEN]:
        piece = placed.items[i][0]
        beside = {
            int(placed.at[j]): item[0]
            for j, item in enumerate(placed.items)
            if len(item) == 1 and item[0].table == piece.table and _beside(item[0], piece)
        }
        for taker in dict.fromkeys([*(r for r in beside if r != giver), *calm]):
            gift = _Gift(problem, placed, piece, giver, taker, beside.get(taker))
            for pair in gift.cuts(problem.ways(placed.items[i])):
                after = max(gift.loads(pair))
                if after < placed.load[giver] * (1 - GAIN) and (best is None or after < best[0]):
                    best = (after, i, taker, pair)
    if best is None:
        return None
    _, i, taker, (stays, goes) = best
    items = (*placed.items[:i], (stays,), *placed.items[i + 1 :], (goes,))
    made = problem.at(items, np.append(placed.at, taker))
    return made if made.score[0] <= placed.score[0] else None


@dataclass
class _Gift:
    """A part of a piece that goes from one rank to another, which may have a neighbouring piece."""

    problem: Problem
    placed: Placed
    piece: Piece
    giver: int
    taker: int
    near: Piece | None

    def ms(self, piece: Piece, rank: int) -> float:
        compute, exchange, _ = self.problem.cost(piece)
        slow = self.problem.ranks.slow if self.placed.slow is None else self.placed.slow
        return compute * slow[rank] + exchange * self.problem.ranks.far[rank]

    def loads(self, pair: tuple[Piece, Piece]) -> tuple[float, float]:
        """Return the loads of giver and taker if the first of a pair stays and the second goes."""
        stays, goes = pair
        gets = self.ms(goes, self.taker)
        if self.near is not None and len(one := joined([self.near, goes])) == 1:
            gets = self.ms(one[0], self.taker) - self.ms(self.near, self.taker)
        gives = self.ms(self.piece, self.giver) - self.ms(stays, self.giver)
        return self.placed.load[self.giver] - gives, self.placed.load[self.taker] + gets

    def cuts(self, ways: tuple[str, ...]) -> Iterator[tuple[Piece, Piece]]:
        """Yield pairs of what stays and what goes.

        These are all cuts by columns for which there is room, and the cut by rows that makes both ranks equally busy,
        or comes as close to that as there is room.
        """
        piece, room = self.piece, int(self.placed.caps[self.taker] - self.placed.used[self.taker])
        if "columns" in ways:
            for first in range(MULTIPLE, piece.dim, MULTIPLE):
                one, other = piece.cut_columns(first)
                yield from (
                    (stays, goes) for stays, goes in ((one, other), (other, one)) if self.problem.cost(goes)[2] <= room
                )
        most = min(piece.rows - 1, room // (self.problem.cost(piece)[2] // piece.rows))
        if "rows" not in ways or most < 1 or (above := self.more(1)) <= 0:
            return
        yield self.cut(most if (below := self.more(most)) > 0 else self._alike(1, above, most, below))

    def _alike(self, low: int, above: float, high: int, below: float) -> int:
        """Return how many rows have to go, between two numbers, so that giver and taker are equally busy.

        Since loads are nearly linear in rows, try where a line through both ends is 0. After a line that did not halve
        the range, try its middle.
        """
        close, by_line = CLOSE * float(self.placed.load[self.giver]), True
        while high - low > max(1, self.piece.rows >> 14):
            width = high - low
            at = low + int(width * above / (above - below)) if by_line else (low + high) // 2
            at = min(max(at, low + 1), high - 1)
            more = self.more(at)
            if abs(more) <= close:
                return at
            low, above, high, below = (at, more, high, below) if more > 0 else (low, above, at, more)
            by_line = high - low <= width // 2
        return low

    def cut(self, moved: int) -> tuple[Piece, Piece]:
        """Cut this many rows off, on the side where the taker has a neighbour."""
        if self.near is None or self.near.row == self.piece.row_end:
            return self.piece.cut_rows(self.piece.rows - moved)
        goes, stays = self.piece.cut_rows(moved)
        return stays, goes

    def more(self, moved: int) -> float:
        """Return by how much the giver is busier than the taker once this many rows have gone."""
        gives, takes = self.loads(self.cut(moved))
        return gives - takes


def _beside(one: Piece, other: Piece) -> bool:
    """Return whether two pieces of one table have the same columns and adjoining rows."""
    return one[3:] == other[3:] and (one.row_end == other.row or one.row == other.row_end)


def _pieces_by_table(items: tuple[Item, ...]) -> dict[int, int]:
    found: dict[int, int] = {}
    for item in items:
        if len(item) == 1:
            found[item[0].table] = found.get(item[0].table, 0) + 1
    return found
