"""The row optimizer of each table: one for all, or one for each pattern of names."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from skirl.core.optim import RowOptimizer, padded
from skirl.core.tables import Table

RowOptimizers = RowOptimizer | Mapping[str, RowOptimizer]
"""One row optimizer for all tables, or one for each pattern; the first pattern that matches a table's name counts."""


def _called(given: object) -> str:
    """Describe a wrong argument: 'the class X' for a class, 'a X' for an object of it."""
    kind = given if isinstance(given, type) else type(given)
    return f"{'the class' if kind is given else 'a'} {kind.__module__}.{kind.__name__}".replace("builtins.", "")


class Group(NamedTuple):
    """The tables of one pattern."""

    name: str
    """The pattern; `*` if one optimizer is for all."""
    optimizer: RowOptimizer
    tables: tuple[int, ...]


class Setting(NamedTuple):
    """The settings of a group that may change between two steps."""

    lr: float
    weight_decay: float


class Groups(Sequence[RowOptimizer]):
    """The row optimizer of each table.

    >>> from skirl import SGD, Adam
    >>> tables = [Table("user_id", 9, 4), Table("item", 9, 4), Table("user_city", 9, 4)]
    >>> groups = Groups(tables, {"user_*": Adam(), "*": SGD(lr=0.5)})
    >>> [(group.name, group.tables) for group in groups.all], groups[1].name
    ([('user_*', (0, 2)), ('*', (1,))], 'SGD')
    >>> Groups(tables, {"user": Adam(), "*": SGD()})
    Traceback (most recent call last):
    ValueError: optimizer has 'user', which is not the first match of any table: there are 'user_id', 'item', 'user_city'
    """

    def __init__(self, tables: Sequence[Table], optimizer: RowOptimizers) -> None:
        by_name = optimizer if isinstance(optimizer, Mapping) else {"*": optimizer}
        for name, rule in by_name.items():
            if not isinstance(rule, RowOptimizer):
                what = f"optimizer[{name!r}]" if isinstance(optimizer, Mapping) else "optimizer"
                raise TypeError(
                    f"{what} is {_called(rule)}: rows have their own, set it to one such as skirl.SGD(lr=0.1), "
                    "skirl.Adagrad, skirl.RowwiseAdagrad, skirl.Adam or skirl.FTRL"
                )
        self.names = tuple(table.name for table in tables)
        first = [next((p for p in by_name if _matches(table.name, p)), None) for table in tables]
        if None in first:
            raise ValueError(
                f"optimizer has no pattern for table {self.names[first.index(None)]!r}: add its name, or '*' for all others"
            )
        for name in by_name:
            if name not in first:
                known = ", ".join(map(repr, self.names))
                raise ValueError(
                    f"optimizer has {name!r}, which is not the first match of any table: there are {known}"
                )
        self.all = tuple(
            Group(name, rule, tuple(t for t, chosen in enumerate(first) if chosen == name))
            for name, rule in by_name.items()
        )
        order = list(by_name)
        self.of = [order.index(str(name)) for name in first]
        """The index of each table's group."""

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, table: Any) -> Any:
        return self.all[self.of[table]].optimizer

    @property
    def records(self) -> list[tuple[str, float]]:
        """Each table's rule and initial state. Two tables of one dim share a cache only if these are equal."""
        return [(rule.kind, rule.initial_state) for rule in self]

    def scalars(
        self, tables: Sequence[int], settings: Sequence[Setting], steps: NDArray[np.int64], dtype: DTypeLike
    ) -> NDArray[Any]:
        """Return the numbers that the kernels of one bank need, [all tables, COLUMNS] in the dtype of the rows.

        Tables outside the bank have zeros. settings: those of each group. steps: number of updates that each table has
        had, including this one.
        """
        counts, known = steps.tolist(), {}  # most tables have had the same number
        rows: list[tuple[float, ...]] = [()] * len(self)
        for t in tables:
            at = self.of[t], counts[t]
            if at not in known:
                known[at] = self[t].numbers(*settings[at[0]], counts[t])
            rows[t] = known[at]
        return padded(rows, dtype)


def matching(pattern: str, names: Sequence[str]) -> list[int]:
    """Return the indices of the names that match a pattern. Raise if there are none.

    >>> matching("user_*", ["user_id", "item", "user_city"])
    [0, 2]
    """
    found = [i for i, name in enumerate(names) if _matches(name, pattern)]
    if not found:
        raise ValueError(f"no table {pattern!r}: there are {', '.join(map(repr, names))}")
    return found


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)
