"""What is searched: tables, ranks, costs; items of one piece or of a group's tables; and one placement of items, scored."""

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
"""What is on one rank together: a piece, or all tables of a group."""
Columns = Literal["exact", "always", "never"]
UNBOUND = 1 << 52
"""Bytes of a rank that nothing is said of."""
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_CHANGES = 256
"""Moves and swaps between two looks at the clock."""
_SETTLED = 3
"""Times that moves are looked for anew where they have changed what a rank's parts cost together."""


@dataclass(frozen=True)
class Ranks:
    """The ranks, in order.

    **Arguments**

    - `caps`: bytes that each may hold of tables.
    - `speeds`: how fast each computes, as a multiple of the machine that costs were measured on.
    - `links`: how fast each exchanges, as a multiple of the costs' link.
    """

    caps: tuple[int, ...]
    speeds: tuple[float, ...]
    links: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.caps or not len(self.caps) == len(self.speeds) == len(self.links):
            raise ValueError("memory, speeds and links are not of as many ranks: give one of each for each rank")
        for what, values in (("memory", self.caps), ("speed", self.speeds), ("link", self.links)):
            for rank, value in enumerate(values):
                if not 0 < value < float("inf"):
                    raise ValueError(f"rank {rank} has {what} {value}: set it above 0")

    @classmethod
    def like(cls, count: int, cap: int = UNBOUND) -> "Ranks":
        """So many ranks that do not differ."""
        return cls((cap,) * count, (1.0,) * count, (1.0,) * count)

    @cached_property
    def slow(self) -> np.ndarray:
        """By what milliseconds of computing are multiplied."""
        return 1 / np.array(self.speeds)

    @cached_property
    def far(self) -> np.ndarray:
        """By what milliseconds of exchange are multiplied."""
        return 1 / np.array(self.links)

    @cached_property
    def bytes_of(self) -> np.ndarray:
        """`caps`, as an array."""
        return np.array(self.caps, np.int64)


@dataclass
class Placed:
    """Items at ranks.

    **Arguments**

    - `items`: all of them; together they cover each table once.
    - `at`: the rank of each.
    - `load`, `used`: milliseconds and bytes of each rank.
    - `caps`: bytes that each may hold.
    - `slow`: by what the milliseconds of its parts are multiplied at each rank; None: by `Ranks.slow`, since they add up.
    """

    items: tuple[Item, ...]
    at: np.ndarray
    load: np.ndarray
    used: np.ndarray
    caps: np.ndarray
    slow: np.ndarray | None = None

    @cached_property
    def score(self) -> tuple[int, float]:
        """Bytes over the caps, then milliseconds of the busiest: less is better."""
        return int(np.maximum(self.used - self.caps, 0).sum()), float(self.load.max())

    def pieces(self, rank: int) -> list[Piece]:
        """Those of a rank."""
        return [piece for item, at in zip(self.items, self.at.tolist(), strict=True) if at == rank for piece in item]


@dataclass
class Problem:
    """One question.

    **Arguments**

    - `specs`: the tables, in an order that does not depend on how they were listed: `canonical` gives it.
    - `ranks`: where they may be.
    - `costs`: of parts of tables.
    - `columns`: whether tables are cut by columns: "exact", where it trains the same model; "always"; "never".
    - `rows`: whether they are cut by rows.
    """

    specs: Sequence[TableSpec]
    ranks: Ranks
    costs: Costs
    columns: Columns = "exact"
    rows: bool = True
    _known: dict[tuple[int, int, int], tuple[float, float, int]] = field(default_factory=dict)
    _adds: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)
    _last: tuple[Any, ...] = (None,)
    """Of the items that were asked for last: theirs is asked for again and again."""
    _cut: tuple[Any, ...] = (None,)
    """The same of the items of which one was cut last."""
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
        for number, spec in enumerate(self.specs):  # what cannot be told is told before the search
            self.cost(whole(number, spec))

    def cost(self, piece: Piece) -> tuple[float, float, int]:
        """Compute and exchange in milliseconds, and bytes."""
        key = _key(piece)
        found = self._known.get(key)
        if found is None:
            spec, rows, dim = self.specs[key[0]], key[1], key[2]
            compute, self._adds[key] = self.costs.part(spec, rows, dim)
            found = self._known[key] = (compute, self.costs.exchange(spec, dim), spec.nbytes(rows, dim))
        return found

    def adds(self, piece: Piece) -> np.ndarray:
        """What a piece adds to the sums of its rank, of which a net makes a factor."""
        self.cost(piece)
        return self._adds[_key(piece)]

    def ways(self, item: Item) -> tuple[str, ...]:
        """How an item may be cut: "rows", "columns"."""
        table, *others = (piece.table for piece in item)
        spec = self.specs[table]
        if others or spec.group is not None or self.pinned[table] >= 0:
            return ()
        by_columns = self.columns == "always" or (self.columns == "exact" and not spec.one_state)
        rows, columns = self.rows and spec.split in ("any", "rows"), by_columns and spec.split in ("any", "columns")
        return ("rows",) * rows + ("columns",) * columns

    def parted(self, item: Item) -> list[tuple[Piece, Piece]]:
        """An item in halves, in each way."""
        made = [halves(item[0], way) for way in self.ways(item)]
        return [pair for pair in made if pair is not None]

    def root(self) -> tuple[Item, ...]:
        """Every table whole, and groups together."""
        groups: dict[str | int, list[Piece]] = {}
        for number, spec in enumerate(self.specs):
            groups.setdefault(number if spec.group is None else spec.group, []).append(whole(number, spec))
        return tuple(map(tuple, groups.values()))

    def arrays(self, items: Sequence[Item], slow: np.ndarray | None = None) -> Arrays:
        """What `balance` takes of items and ranks; slow: of the ranks, if not their own."""
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
        """Items with one of them in two; of the others nothing is asked again, of which there may be a thousand."""
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
        """Items to the least busy rank, one after the other."""
        arrays, ranks = self.arrays(items), len(self.ranks.caps)
        at, load, used = np.zeros(len(items), np.int64), np.zeros(ranks), np.zeros(ranks, np.int64)
        args: Any = (order, *arrays, at, load, used)
        balance.greedy(*args)
        return self.together(Placed(items, at, load, used, self.ranks.bytes_of))

    def at(self, items: tuple[Item, ...], at: np.ndarray) -> Placed:
        """Items where they are told to be."""
        compute, exchange, nbytes, _, slow, far, caps = self.arrays(items)
        load = np.bincount(at, compute * slow[at] + exchange * far[at], minlength=len(caps))
        used = np.zeros(len(caps), np.int64)
        np.add.at(used, at, nbytes)
        return self.together(Placed(items, at, load, used, caps))

    def together(self, placed: Placed) -> Placed:
        """The same with what ranks take for all that they have, where that is not the sum of what each part takes."""
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
        """After moves and swaps, as many as gain."""
        if self.costs.by_net:
            return self._improved_together(self.at(placed.items, placed.at), most, clock)
        return self._improved(placed, most, clock)

    def _improved_together(self, placed: Placed, most: int, clock: Callable[[], bool]) -> Placed:
        """The loops take a rank's factor as its slowness; where all it has has changed, so has the factor."""
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
    """All that the costs of a piece depend on: its table, how many rows, how many columns."""
    return piece[0], piece[2] - piece[1], piece[4] - piece[3]


def canonical(specs: Sequence[TableSpec]) -> list[int]:
    """Numbers of tables in an order that does not depend on how they are listed; names decide between equal ones.

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
