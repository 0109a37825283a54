"""How often the columns of rows in order change, how often what they hold comes, and which lists shift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.dedup.layout import changed
from skirl.dedup.window_layout import Buffers

MOSTLY = 0.5
"""Which share of the changes of a list are shifts, at least, where it is said to shift."""


@dataclass(frozen=True)
class Column:
    """What was found of a column."""

    name: str
    lists: bool
    ids: int
    """Values of all rows,"""
    once: int
    """and those that are left where a row's that equal the row above's are left out."""
    own: np.ndarray
    """bool [n]: where they are not."""
    change: float
    """Share of the rows that have one above in their session and differ from it."""
    windows: Buffers | None
    """Of a list that shifts."""

    @property
    def factor(self) -> float:
        """How often what it holds comes, on average."""
        return self.ids / max(1, self.once)

    @property
    def window_factor(self) -> float | None:
        """The same where a session's list is one buffer."""
        return None if self.windows is None else self.ids / max(1, len(self.windows.values))


def column_of(name: str, array: Any, new: np.ndarray) -> Column:
    """What is found of one.

    **Arguments**

    - `name`: of the column.
    - `array`: its values in order, an Arrow array without nulls.
    - `new`: bool [n]: where sessions begin.
    """
    rows, first = len(new), int(new.sum())
    if not pa.types.is_list(array.type):
        values = array.to_numpy(zero_copy_only=False)
        own = new.copy()
        own[1:] |= values[1:] != values[:-1]
        return Column(name, False, rows, int(own.sum()), own, _share(own, new, rows - first), None)
    own, sizes = changed(array, new), np.diff(array.offsets.to_numpy()).astype(np.int64)
    found = Buffers(array, new)
    changes = int(own.sum()) - first
    shifts = changes > 0 and int((own & ~found.fresh).sum()) >= MOSTLY * changes
    once = int(sizes[own].sum())
    return Column(name, True, int(sizes.sum()), once, own, _share(own, new, rows - first), found if shifts else None)


def _share(own: np.ndarray, new: np.ndarray, rows: int) -> float:
    return float((own & ~new).sum() / max(1, rows))


def together(columns: Sequence[Column]) -> list[list[str]]:
    """Names of columns that change at the same rows, those of each group in order; columns that are alone are left out.

    **Arguments**

    - `columns`: what was found.
    """
    groups: dict[bytes, list[str]] = {}
    for column in columns:
        groups.setdefault(np.packbits(column.own).tobytes(), []).append(column.name)
    return [names for names in groups.values() if len(names) > 1]
