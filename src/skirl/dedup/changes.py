"""Statistics of columns: changes from row to row, values that repeat, and lists that shift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.dedup.layout import changed
from skirl.dedup.window_layout import Buffers

MOSTLY = 0.5
"""A list column shifts if at least this share of its changes are shifts."""


@dataclass(frozen=True)
class Column:
    """The figures of a column."""

    name: str
    lists: bool
    ids: int
    """Number of values in all rows,"""
    once: int
    """and the number left if rows equal to the row above in the same session are left out."""
    own: np.ndarray
    """bool [n]: True for rows that are not left out."""
    change: float
    """Share of rows that differ from the row above, among those with one in the same session."""
    windows: Buffers | None
    """The buffers of a list that shifts; None for other columns."""

    @property
    def factor(self) -> float:
        """Average number of times that a value is repeated."""
        return self.ids / max(1, self.once)

    @property
    def window_factor(self) -> float | None:
        """The same with lists written as windows of buffers; None if the column does not shift."""
        return None if self.windows is None else self.ids / max(1, len(self.windows.values))


def column_of(name: str, array: Any, new: np.ndarray) -> Column:
    """Return the figures of a column.

    **Arguments**

    - `name`: name of the column.
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
    """Return groups of names of columns that change at the same rows. Columns that change alone are left out.

    **Arguments**

    - `columns`: the columns' figures.
    """
    groups: dict[bytes, list[str]] = {}
    for column in columns:
        groups.setdefault(np.packbits(column.own).tobytes(), []).append(column.name)
    return [names for names in groups.values() if len(names) > 1]
