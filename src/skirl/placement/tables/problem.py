"""A placement problem: tables, ranks and costs; items, each a piece or a group's tables; and a scored placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from skirl.placement.tables import balance
from skirl.placement.tables.costs import Costs
from skirl.placement.tables.pieces import Piece, halves, whole
from skirl.placement.tables.spec import TableSpec, check_specs

Item = tuple[Piece, ...]
"""Pieces that stay together on one rank: one alone, or those of all tables of a group."""
Columns = Literal["exact", "always", "never"]
UNBOUND = 1 << 52
"""Bytes of a rank without a limit."""
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_CHANGES = 256
"""Moves and swaps between two looks at the clock."""
_SETTLED = 3
"""Most rounds of moves and swaps where these change what a rank's parts cost together."""


@dataclass(frozen=True)
class Ranks:
    """The ranks, in order.

    **Arguments**

    - `caps`: bytes of tables that each may hold.
    - `speeds`: how fast each computes, relative to the machine that costs were measured on.
    - `links`: how fast each exchanges, relative to the costs' link.
    """

    caps: tuple[int, ...]
    speeds: tuple[float, ...]
    links: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.caps or not len(self.caps) == len(self.speeds) == len(self.links):
            raise ValueError("memory, speeds and links need one number for each rank: give as many of each")
        for what, values in (("memory", self.caps), ("speed", self.speeds), ("link", self.links)):
            for rank, value in enumerate(values):
                if not 0 < value < float("inf"):
                    raise ValueError(f"rank {rank} has {what} {value}: set it above 0")

    @classmethod
    def like(cls, count: int, cap: int = UNBOUND) -> "Ranks":
        """Return `count` equal ranks."""
        return cls((cap,) * count, (1.0,) * count, (1.0,) * count)

    @cached_property
    def slow(self) -> np.ndarray:
        """Factor for milliseconds of computing, by rank."""
        return 1 / np.array(self.speeds)

    @cached_property
    def far(self) -> np.ndarray:
        """Factor for milliseconds of exchange, by rank."""
        return 1 / np.array(self.links)

    @cached_property
    def bytes_of(self) -> np.ndarray:
        """`caps`, as an array."""
        return np.array(self.caps, np.int64)


@dataclass
class Placed:
    """A placement of items at ranks.

    **Arguments**

    - `items`: all of them; together they cover each table once.
    - `at`: the rank of each item.
    - `load`, `used`: milliseconds and bytes of each rank.
    - `caps`: bytes that each rank may hold.
    - `slow`: factor for computing milliseconds at each rank; None: `Ranks.slow`, since those of parts add up.
    """

    items: tuple[Item, ...]
    at: np.ndarray
    load: np.ndarray
    used: np.ndarray
    caps: np.ndarray
    slow: np.ndarray | None = None

    @cached_property
    def score(self) -> tuple[int, float]:
        """Bytes over the caps, then milliseconds of the busiest rank: less is better."""
        return int(np.maximum(self.used - self.caps, 0).sum()), float(self.load.max())

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of a rank."""
        return [piece for item, at in zip(self.items, self.at.tolist(), strict=True) if at == rank for piece in item]


@dataclass
class Problem:
    """A placement problem: tables, ranks and costs.

    **Arguments**

    - `specs`: the tables, in an order that does not depend on how they were listed: `canonical` gives it.
    - `ranks`: the ranks to place them on.
    - `costs`: costs of parts of tables.
    - `columns`: whether tables may be cut by columns: "exact", where it trains the same model; "always"; "never".
    - `rows`: whether they may be cut by rows.
    """

    specs: Sequence[TableSpec]
    ranks: Ranks
    costs: Costs
    columns: Columns = "exact"
    rows: bool = True
    _known: dict[tuple[int, int, int], tuple[float, float, int]] = field(default_factory=dict)
    _adds: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    _last: tuple[Any, ...] = (None,)
    """Arrays of the last items that were asked for: the same ones are asked for again and again."""
    _cut: tuple[Any, ...] = (None,)
    """Arrays of the items of which one was cut last."""
    _last_adds: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_specs(self.specs)
        for spec in self.specs:
            if spec.rank is not None and spec.rank >= len(self.ranks.caps):
                raise ValueError(
                    f"table {spec.name!r} has rank {spec.rank}, there are ranks 0 to {len(self.ranks.caps) - 1}: name one"
                )
        if len(self.ranks.caps) > (rows := sum(spec.rows for spec in self.specs)):
            raise ValueError(f"there are {len(self.ranks.caps)} ranks for {rows} rows: set fewer ranks than rows")
        self.pinned = [spec.rank if spec.rank is not None else -1 for spec in self.specs]
        groups = {spec.group: spec.rank for spec in self.specs if spec.group is not None and spec.rank is not None}
        for number, spec in enumerate(self.specs):
            if spec.group in groups:
                self.pinned[number] = groups[spec.group]
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

    def ways(self, item: Item) -> tuple[str, ...]:
        """Return the ways in which an item may be cut: "rows", "columns"."""
        table, *others = (piece.table for piece in item)
        spec = self.specs[table]
        if others or spec.group is not None or self.pinned[table] >= 0:
            return ()
        by_columns = self.columns == "always" or (self.columns == "exact" and not spec.one_state)
        rows, columns = self.rows and spec.split in ("any", "rows"), by_columns and spec.split in ("any", "columns")
        return ("rows",) * rows + ("columns",) * columns

    def parted(self, item: Item) -> list[tuple[Piece, Piece]]:
        """Return the halves of an item, for each way to cut it."""
        made = [halves(item[0], way) for way in self.ways(item)]
        return [pair for pair in made if pair is not None]

    def root(self) -> tuple[Item, ...]:
        """Return every table whole, with groups together."""
        groups: dict[str | int, list[Piece]] = {}
        for number, spec in enumerate(self.specs):
            groups.setdefault(number if spec.group is None else spec.group, []).append(whole(number, spec))
        return tuple(map(tuple, groups.values()))

    def arrays(self, items: Sequence[Item], slow: np.ndarray | None = None) -> Arrays:
        """Return the arrays that `balance` takes for items and ranks. `slow` replaces that of the ranks."""
        if self._last[0] is not items or not isinstance(items, tuple):
            of = [
                self.cost(item[0]) if len(item) == 1 else tuple(map(sum, zip(*map(self.cost, item)))) for item in items
            ]
            compute, exchange, nbytes = zip(*of)
            fixed = np.array([self.pinned[item[0].table] for item in items], np.int64)
            self._last = (items, np.array(compute), np.array(exchange), np.array(nbytes, np.int64), fixed)
            self._last_adds = None
        ranks = self.ranks
        return *self._last[1:], ranks.slow if slow is None else slow, ranks.far, ranks.bytes_of

    def with_cut(self, items: tuple[Item, ...], number: int, pair: tuple[Piece, Piece]) -> tuple[Item, ...]:
        """Return items with one of them cut in two. What is known of the others, maybe a thousand, is kept."""
        if self._cut[0] is not items:
            self.arrays(items)
            self._cut = self._last
        found = (*items[:number], *items[number + 1 :], (pair[0],), (pair[1],))
        fixed = self.pinned[pair[0].table]
        more = zip(*((*self.cost(piece), fixed) for piece in pair))
        self._last = (found, *(np.append(np.delete(was, number), now) for was, now in zip(self._cut[1:], more)))
        self._last_adds = None
        return found

    def greedy(self, items: tuple[Item, ...], order: np.ndarray) -> Placed:
        """Put items on the least busy rank, one after the other."""
        arrays, ranks = self.arrays(items), len(self.ranks.caps)
        at, load, used = np.zeros(len(items), np.int64), np.zeros(ranks), np.zeros(ranks, np.int64)
        args: Any = (order, *arrays, at, load, used)
        balance.greedy(*args)
        return self.together(Placed(items, at, load, used, self.ranks.bytes_of))

    def at(self, items: tuple[Item, ...], at: np.ndarray) -> Placed:
        """Put items on the ranks given."""
        compute, exchange, nbytes, _, slow, far, caps = self.arrays(items)
        load = np.bincount(at, compute * slow[at] + exchange * far[at], minlength=len(caps))
        used = np.zeros(len(caps), np.int64)
        np.add.at(used, at, nbytes)
        return self.together(Placed(items, at, load, used, caps))

    def together(self, placed: Placed) -> Placed:
        """Return the placement with loads by net, where a rank's load is not the sum over its parts."""
        if not self.costs.by_net:
            return placed
        ranks, items = self.ranks, placed.items
        compute, exchange, *_ = self.arrays(items)
        if self._last_adds is None:
            self._last_adds = np.array([sum(self._adds[_key(piece)] for piece in item) for item in items])
        of = self._last_adds.T
        sums = np.stack([np.bincount(placed.at, column, minlength=len(ranks.caps)) for column in of], axis=1)
        slow = ranks.slow * self.costs.factors(sums)
        load = np.bincount(
            placed.at, compute * slow[placed.at] + exchange * ranks.far[placed.at], minlength=len(ranks.caps)
        )
        return Placed(items, placed.at, load, placed.used, placed.caps, slow)

    def improved(self, placed: Placed, most: int = 1 << 40, clock: Callable[[], bool] = lambda: False) -> Placed:
        """Move and swap items as long as that gains."""
        if self.costs.by_net:
            return self._improved_together(self.at(placed.items, placed.at), most, clock)
        return self._improved(placed, most, clock)

    def _improved_together(self, placed: Placed, most: int, clock: Callable[[], bool]) -> Placed:
        """Improve with each rank's factor as part of its slowness. Repeat, since moves change the factor."""
        for _ in range(_SETTLED):
            after = self.together(self._improved(placed, most, clock))
            if after.score >= placed.score:
                break
            placed = after
        return placed

    def _improved(self, placed: Placed, most: int, clock: Callable[[], bool]) -> Placed:
        arrays, at = self.arrays(placed.items, placed.slow), placed.at.copy()
        load, used = placed.load.copy(), placed.used.copy()
        while most > 0 and not clock():
            args: Any = (*arrays, at, load, used, min(_CHANGES, most))
            done = balance.improve(*args)
            most -= done
            if done < _CHANGES:
                break
        return Placed(placed.items, at, load, used, self.ranks.bytes_of)


def _key(piece: Piece) -> tuple[int, int, int]:
    """Return all that a piece's costs depend on: its table, number of rows and number of columns."""
    return piece[0], piece[2] - piece[1], piece[4] - piece[3]


def canonical(specs: Sequence[TableSpec]) -> list[int]:
    """Return the numbers of tables in an order that does not depend on how they are listed. Names break ties.

    **Arguments**

    - `specs`: the tables.

    >>> a, b = (TableSpec(name, rows, 4, 8, 8.0, 4.0) for name, rows in (("a", 9), ("b", 99)))
    >>> canonical([a, b]), canonical([b, a])
    ([1, 0], [0, 1])
    """

    def key(n: int) -> tuple:
        s = specs[n]
        pin = -1 if s.rank is None else s.rank
        return (
            -s.ids * s.dim,
            -s.rows,
            -s.dim,
            -s.ids,
            -s.distinct,
            s.batch,
            s.optimizer,
            s.split,
            pin,
            s.reuse,
            s.name,
        )

    return sorted(range(len(specs)), key=key)
