"""How often the columns of rows in order change, how often what they hold comes, and which lists shift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.dedup.layout import changed
from skirl.tools.jit import kernel

MOST_NEW = 8
"""Ids that enter a list at a change that is a shift, at most."""
MOSTLY = 0.5
"""Which share of the changes of a list are shifts, at least, where it is said to shift."""


@dataclass(frozen=True)
class Windows:
    """A list column as buffers: each row has a stretch of one, and new ids are added to it as lists shift."""

    values: np.ndarray
    """int64: the ids of all buffers."""
    sizes: np.ndarray
    """int64 [n]: of the buffer that begins at a row; 0 where none does."""
    written: np.ndarray
    """bool [n]: where one begins."""
    starts: np.ndarray
    """int32 [n]: where each row's list begins in its buffer,"""
    lengths: np.ndarray
    """int32 [n]: and how long it is."""
    shifts: int
    """Changes that are shifts."""


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
    windows: Windows | None
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
    found = windows_of(array, new, own)
    changes = int(own.sum()) - first
    shifts = changes > 0 and found.shifts >= MOSTLY * changes
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


def windows_of(array: Any, new: np.ndarray, own: np.ndarray) -> Windows:
    """Lists as buffers; one that is no shift of the row above's begins another.

    **Arguments**

    - `array`: an Arrow list array without nulls.
    - `new`: bool [n]: where sessions begin.
    - `own`: bool [n]: where a list is not that of the row above, or a session begins.
    """
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = np.ascontiguousarray(array.values.to_numpy(zero_copy_only=False))
    sizes, starts = np.zeros(len(new), np.int64), np.zeros(len(new), np.int32)
    written, out = np.zeros(len(new), np.bool_), np.empty(max(1, int(offsets[-1] - offsets[0])), values.dtype)
    # Ids that enter in front stand behind the others, the newest last: no size depends on how the first list stands.
    at, shifts = _windows(offsets, values, new, own, MOST_NEW, out, sizes, starts, written)
    return Windows(out[:at], sizes, written, starts, np.diff(offsets).astype(np.int32), shifts)


@kernel
def shift_of(values, before, begin, end, most):
    """By how many new ids a list is that before it, shifted: > 0 at its end, < 0 in front; 0 where it is none; most + 1
    where it has only lost ids at its front, -most - 1 where only at its end.

    **Arguments**

    - `values`: of all lists.
    - `before`, `begin`, `end`: where the list before begins, and this one, and ends.
    - `most`: new ids at most.
    """
    had, has = begin - before, end - begin
    for new in range(min(most, has - 1) + 1):
        both = has - new  # ids that stay
        if both > had:
            continue
        same = True
        for k in range(both):
            if values[begin + k] != values[begin - both + k]:
                same = False
                break
        if same:
            return new if new else most + 1
        same = True
        for k in range(both):
            if values[begin + new + k] != values[before + k]:
                same = False
                break
        if same:
            return -new if new else -most - 1
    return 0


@kernel
def _windows(offsets, values, new, own, most, out, sizes, starts, written):
    """Fill in buffers; how many ids they have, and how many changes are shifts."""
    at = buffer = shifts = 0
    begins, front = 0, 0  # of the list in its buffer; 1 where ids enter in front, -1 at the end, 0 where none has
    for i in range(new.size):
        begin, end = offsets[i], offsets[i + 1]
        by = 0
        if not own[i]:
            starts[i] = begins
            continue
        if not new[i]:
            by = shift_of(values, offsets[i - 1], begin, end, most)
            shifts += by != 0
        side = 1 if by < 0 else -1
        if by == 0 or (front != 0 and side != front):
            buffer, begins, front = i, 0, 0
            written[i] = True
            for k in range(begin, end):
                out[at] = values[k]
                at += 1
            sizes[i] = end - begin
        else:
            front = side
            count = 0 if abs(by) > most else abs(by)
            begins += (begin - offsets[i - 1]) - (end - begin - count)
            for k in range(count):
                out[at] = values[end - count + k] if by > 0 else values[begin + count - 1 - k]
                at += 1
            sizes[buffer] += count
        starts[i] = begins
    return at, shifts
