"""Tables, banks and features. The tables of one dim and one kind of record share a bank."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from skirl.core.initial import Constant, Given, Initial, Normal, Uniform
from skirl.core.keys import MAX_ROWS, MAX_TABLES, ROW_BITS

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True)
class Table:
    """One embedding table.

    **Arguments**

    - `name`: the table's name in errors, exports and checkpoints.
    - `rows`: number of rows, at most 2**48: ids run from 0 to `rows - 1`. A row that was never used takes one bit.
    - `dim`: length of a row's vector. Tables of one dim and one kind of row optimizer share a cache.
    - `features`: the id features that look up rows in this table; if empty, one feature with the table's own name.
    - `pooling`: how the rows of a bag become one vector, "sum" or "mean". "sum" needs no division; with one id per bag
      both are the same.
    - `init`: how rows are initialized; None means `Uniform(1 / sqrt(rows))`, as in DLRM. Or the initial values of all
      rows, `[rows, dim]`: an array or a tensor, which is copied, unless it is mapped read-only from a file, which must
      not change while it is in use.

    >>> Table("item", rows=1000, dim=64, features=("clicked", "bought"), pooling="mean").features
    ('clicked', 'bought')
    >>> Table("user", rows=1000, dim=64).features
    ('user',)
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...] = ()
    pooling: Pooling = "sum"
    init: Initial | Any = None

    def __post_init__(self) -> None:
        for name in ("rows", "dim"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int):
                raise TypeError(f"table {self.name!r}: {name} is {value!r}, set it to an int")
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"table {self.name!r}: rows is {self.rows}, set it between 1 and 2**{ROW_BITS}")
        if self.dim < 1:
            raise ValueError(f"table {self.name!r}: dim is {self.dim}, set it to 1 or more")
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"table {self.name!r}: pooling is {self.pooling!r}, set it to 'sum' or 'mean'")
        if isinstance(self.features, str):
            raise TypeError(f"table {self.name!r}: features is a str, set it to a tuple: ({self.features!r},)")
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if self.init is None:
            object.__setattr__(self, "init", Uniform(self.rows**-0.5))
        elif not isinstance(self.init, Uniform | Normal | Constant):
            object.__setattr__(self, "init", Given.of(self.init, self.name, self.rows, self.dim))

    @property
    def initial(self) -> Initial:
        """`init` with the default filled in, and with given values as a `Given`."""
        assert isinstance(self.init, Initial)
        return self.init


@dataclass(frozen=True)
class Feature:
    name: str
    table: int
    column: int
    """Index of this feature among those of its bank, and so in the stacked output."""


@dataclass(frozen=True)
class Bank:
    """The tables of one dim and one kind of row optimizer: alike in their records, they share a cache and a planner."""

    dim: int
    tables: tuple[int, ...]
    features: tuple[Feature, ...]


@dataclass(frozen=True)
class Schema:
    """All tables of a collection, resolved: features in table order, tables of one dim and one record in one bank."""

    tables: tuple[Table, ...]
    banks: tuple[Bank, ...]

    @classmethod
    def of(
        cls,
        tables: Sequence[Table],
        records: Sequence[Hashable] | None = None,
        banks: Sequence[tuple[int, ...]] | None = None,
    ) -> "Schema":
        tables = tuple(tables)
        if not tables:
            raise ValueError("no tables given: pass at least one skirl.Table")
        if len(tables) > MAX_TABLES:
            raise ValueError(f"{len(tables)} tables given: pass at most {MAX_TABLES}")
        for what, names in (("table", [t.name for t in tables]), ("feature", [f for t in tables for f in t.features])):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"{what} {twice!r} is given twice: give each its own name")
        kinds = [(t.dim, None if records is None else records[i]) for i, t in enumerate(tables)]
        if banks is None:
            by_dim = sorted(dict.fromkeys(kinds), key=lambda kind: kind[0])  # within a dim, in order of appearance
            banks = [tuple(i for i, other in enumerate(kinds) if other == kind) for kind in by_dim]
        found = []
        for members in banks:
            named = [(name, i) for i in members for name in tables[i].features]
            features = tuple(Feature(name, i, column) for column, (name, i) in enumerate(named))
            found.append(Bank(tables[members[0]].dim, members, features))
        return cls(tables, tuple(found))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """Every feature's name, in table order: the order of the collection's outputs."""
        return tuple(name for t in self.tables for name in t.features)
