"""A placement problem: tables, the memory of ranks, and costs; and a placement of pieces with its score."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from skirl.placement import balance
from skirl.placement.costs import Costs
from skirl.placement.pieces import Piece, whole
from skirl.placement.spec import TableSpec, check_specs

Columns = Literal["exact", "always", "never"]
UNBOUND = 1 << 52
"""Bytes of a rank without a limit."""
_CHANGES = 256
"""Moves and swaps between two looks at the clock."""
_SETTLED = 3
"""Most rounds of moves and swaps where these change what a rank's parts cost together."""


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

    @cached_property
    def score(self) -> tuple[int, float]:
        """Bytes over the caps, then milliseconds of the busiest rank: less is better."""
        return int(np.maximum(self.used - self.caps, 0).sum()), float(self.load.max())

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of a rank."""
        return [self.items[n] for n in np.flatnonzero(self.at == rank).tolist()]


@dataclass
class Problem:
    """A placement problem: tables in their canonical order, bytes that each rank may hold, costs, and how to cut.

    `columns` says whether tables may be cut by columns: "exact", where that trains the same model; "always"; "never".
    """

    specs: Sequence[TableSpec]
    caps: tuple[int, ...]
    costs: Costs
    columns: Columns = "exact"
    rows: bool = True
    _known: dict[tuple[int, int, int], tuple[float, float, int]] = field(default_factory=dict)
    _adds: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    _last: tuple[Any, ...] = (None,)
    """Arrays of the last items that were asked for: the same ones are asked for again and again."""
    _cut: tuple[Any, ...] = (None,)
    """Arrays of the items of which one was cut last."""

    def __post_init__(self) -> None:
        check_specs(self.specs)
        if not self.caps or min(self.caps) <= 0:
            raise ValueError(f"the ranks hold {self.caps} bytes: give each more than 0")
        for spec in self.specs:
            if spec.rank is not None and spec.rank >= len(self.caps):
                raise ValueError(
                    f"table {spec.name!r} has rank {spec.rank}, there are ranks 0 to {len(self.caps) - 1}: name one"
                )
        if len(self.caps) > (rows := sum(spec.rows for spec in self.specs)):
            raise ValueError(f"there are {len(self.caps)} ranks for {rows} rows: set fewer ranks than rows")
        self.bytes_of = np.array(self.caps, np.int64)
        self.pinned = [-1 if spec.rank is None else spec.rank for spec in self.specs]
        for number, spec in enumerate(self.specs):  # raises before the search if a cost is missing
            self.cost(whole(number, spec))

    def cost(self, piece: Piece) -> tuple[float, float, int]:
        """Return milliseconds of computing and of exchange, and bytes."""
        key = _key(piece)
        found = self._known.get(key)
        if found is None:
            spec, rows, dim = self.specs[key[0]], key[1], key[2]
            compute, self._adds[key] = self.costs.part(spec, rows, dim)
            found = self._known[key] = (compute, self.costs.exchange(spec, dim), spec.nbytes(rows, dim))
        return found

    def adds(self, piece: Piece) -> np.ndarray:
        """Return what a piece adds to the sums of its rank, from which a net makes a factor."""
        self.cost(piece)
        return self._adds[_key(piece)]

    def by_rows(self, spec: TableSpec) -> bool:
        """Return whether a table may be cut by rows."""
        return self.rows and spec.rank is None and spec.split in ("any", "rows")

    def by_columns(self, spec: TableSpec) -> bool:
        """Return whether a table may be cut by columns."""
        may = self.columns == "always" or (self.columns == "exact" and not spec.one_state)
        return may and spec.rank is None and spec.split in ("any", "columns")

    def root(self) -> tuple[Piece, ...]:
        """Return every table whole."""
        return tuple(whole(number, spec) for number, spec in enumerate(self.specs))

    def arrays(self, items: tuple[Piece, ...]) -> tuple[np.ndarray, ...]:
        """Return compute and exchange ms, bytes, pins and what is added to sums, each [items]."""
        if self._last[0] is not items:
            compute, exchange, nbytes = zip(*map(self.cost, items))
            fixed = np.array([self.pinned[piece.table] for piece in items], np.int64)
            adds = np.array([self._adds[_key(piece)] for piece in items])
            self._last = (items, np.array(compute), np.array(exchange), np.array(nbytes, np.int64), fixed, adds)
        return self._last[1:]

    def with_cut(self, items: tuple[Piece, ...], number: int, pair: tuple[Piece, Piece]) -> tuple[Piece, ...]:
        """Return items with one of them cut in two. What is known of the others, maybe a thousand, is kept."""
        if self._cut[0] is not items:
            self.arrays(items)
            self._cut = self._last
        made = (*items[:number], *items[number + 1 :], *pair)
        more = zip(*((*self.cost(piece), self.pinned[piece.table], self.adds(piece)) for piece in pair))
        kept = [np.append(np.delete(was, number, axis=0), now, axis=0) for was, now in zip(self._cut[1:], more)]
        self._last = (made, *kept)
        return made

    def greedy(self, items: tuple[Piece, ...], order: np.ndarray) -> Placed:
        """Put items on the least busy rank, one after the other."""
        at, load, used = np.zeros(len(items), np.int64), np.zeros(len(self.caps)), np.zeros(len(self.caps), np.int64)
        args: Any = (order, *self._loops(items), at, load, used)
        balance.greedy(*args)
        return self._together(items, at, used)

    def at(self, items: tuple[Piece, ...], at: np.ndarray) -> Placed:
        """Put items on the ranks given."""
        used = np.zeros(len(self.caps), np.int64)
        np.add.at(used, at, self.arrays(items)[2])
        return self._together(items, at, used)

    def improved(self, placed: Placed, most: int = 1 << 40, clock: Callable[[], bool] = lambda: False) -> Placed:
        """Move and swap items as long as that gains. Repeat where moves change what parts cost together."""
        if self.costs.net is None:
            return self._moved(placed, most, clock)
        for _ in range(_SETTLED):
            after = self._moved(placed, most, clock)
            if after.score >= placed.score:
                break
            placed = after
        return placed

    def _moved(self, placed: Placed, most: int, clock: Callable[[], bool]) -> Placed:
        at, load, used = placed.at.copy(), placed.load.copy(), placed.used.copy()
        while most > 0 and not clock():
            args: Any = (*self._loops(placed.items, placed.slow), at, load, used, min(_CHANGES, most))
            done = balance.improve(*args)
            most -= done
            if done < _CHANGES:
                break
        return self._together(placed.items, at, used)

    def _loops(self, items: tuple[Piece, ...], slow: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return the arrays that the loops of `balance` take."""
        return *self.arrays(items)[:4], np.ones(len(self.caps)) if slow is None else slow, self.bytes_of

    def _together(self, items: tuple[Piece, ...], at: np.ndarray, used: np.ndarray) -> Placed:
        """Return a placement with its loads; by a net, that of a rank is not the sum over its parts."""
        compute, exchange, _, _, adds = self.arrays(items)
        ranks, slow = len(self.caps), np.ones(len(self.caps))
        if self.costs.net is not None:
            sums = np.stack([np.bincount(at, column, minlength=ranks) for column in adds.T], axis=1)
            slow = self.costs.factors(sums)
        load = np.bincount(at, compute * slow[at] + exchange, minlength=ranks)
        return Placed(items, at, load, used, self.bytes_of, slow)


def _key(piece: Piece) -> tuple[int, int, int]:
    """Return all that a piece's costs depend on: its table, number of rows and number of columns."""
    return piece[0], piece[2] - piece[1], piece[4] - piece[3]


def over_caps(problem: Problem, placed: Placed) -> list[int]:
    """Return the bytes by which each rank exceeds its memory, added up from the pieces, not as the search kept them."""
    over = [-cap for cap in problem.caps]
    for piece, rank in zip(placed.items, placed.at.tolist(), strict=True):
        over[rank] += problem.specs[piece.table].nbytes(piece.rows, piece.dim)
    return [max(0, nbytes) for nbytes in over]
