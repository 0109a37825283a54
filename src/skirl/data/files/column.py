"""Rows of files as numbers, of which batches are made, and their columns of ids, one or a list for each row.

A list that several rows have is stored once, with an inverse."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import grouped, pays
from skirl.tools.jit import kernel, prefetch, read_only

LISTS_AHEAD = 4  # a list is fetched so early into the processor's cache: one begins anywhere if rows are shuffled
LINE = 16  # ids of 32 bits in a line of the cache


class Bags(NamedTuple):
    of: np.ndarray
    """int64: by bag, its list in the column, or its row if each row has one id."""
    ids: int
    inverse: np.ndarray | None
    """int32 [rows]: the bag of each row; None if each row has a bag of its own."""


@dataclass(frozen=True)
class Column:
    """The ids of n rows."""

    values: np.ndarray
    """int64 or int32."""
    offsets: np.ndarray | None = None
    """int64 [lists + 1]: where each list begins in `values`, and where the last one ends; None if each row has one id."""
    inverse: np.ndarray | None = None
    """int64 [n]: the list of each row; None if each row has its own."""

    def __len__(self) -> int:
        rows = self.values if self.offsets is None else self.offsets[1:]
        return len(rows if self.inverse is None else self.inverse)

    def slice(self, low: int, high: int) -> "Column":
        if self.offsets is None:
            return Column(self.values[low:high])
        if self.inverse is None:
            return Column(self.values, self.offsets[low : high + 1])
        return Column(self.values, self.offsets, self.inverse[low:high])

    def take(self, rows: np.ndarray) -> "Column":
        if self.offsets is None:
            return Column(self.values.take(rows))
        if self.inverse is not None:
            return Column(self.values, self.offsets, self.inverse[rows])
        bags = self.bags(rows)
        values, lengths = np.empty(bags.ids, self.values.dtype), np.empty(len(rows), np.int64)
        self.fill(bags, values, lengths)
        return Column(values, offsets_of(lengths))

    def expanded(self) -> "Column":
        """The same rows with a list for each."""
        return self if self.inverse is None else Column(self.values, self.offsets).take(self.inverse)

    @staticmethod
    def concat(columns: "Sequence[Column]") -> "Column":
        """Lists that come before or after all that a column's rows have are dropped."""
        if columns[0].offsets is None:
            return Column(np.concatenate([each.values for each in columns]))
        shared = any(each.inverse is not None for each in columns)
        values, lengths, inverses, lists = [], [], [], 0
        for each in columns:
            offsets, inverse = each.offsets, each.inverse
            assert offsets is not None
            if inverse is not None and len(inverse):
                first = int(inverse.min())
                offsets, inverse = offsets[first : int(inverse.max()) + 2], inverse - first
            values.append(each.values[offsets[0] : offsets[-1]])
            lengths.append(np.diff(offsets))
            inverses.append(lists + (np.arange(len(offsets) - 1) if inverse is None else inverse))
            lists += len(offsets) - 1
        inverse = np.concatenate(inverses) if shared else None
        return Column(np.concatenate(values), offsets_of(np.concatenate(lengths)), inverse)

    def bags(self, rows: np.ndarray) -> Bags:
        """A list of several rows is one bag if that pays, as `skirl.core.once` decides."""
        offsets, inverse = self.offsets, self.inverse
        if offsets is None:
            return Bags(rows, len(rows), None)
        if inverse is None:
            return Bags(rows, int(offsets[rows + 1].sum() - offsets[rows].sum()), None)
        kept, which = numbered(inverse[rows])
        sizes = offsets[kept + 1] - offsets[kept]
        left, total = int(sizes.sum()), int(sizes[which].sum())
        return Bags(kept, left, which) if pays(total, left, len(rows)) else Bags(inverse[rows], total, None)

    def fill(self, bags: Bags, values: np.ndarray, lengths: np.ndarray) -> None:
        """Copy the ids of bags to `values`, and their numbers to `lengths`."""
        if self.offsets is None:
            values[:], lengths[:] = self.values.take(bags.of), 1
        else:
            _copy_lists(read_only(self.values), self.offsets, bags.of, values, lengths)


@dataclass
class Encoded:
    """Rows of a part of a file as numbers, without malformed ones."""

    labels: np.ndarray
    """float32 [n, labels]."""
    dense: np.ndarray
    """float32 [n, dense features]."""
    ids: list[Column]
    places: np.ndarray
    """int64 [n]: the index of each row in its part."""
    read: int = 0
    """Number of rows that were read, with those left out,"""
    bad: int = 0
    """of which so many were malformed."""
    kept: list[Any] = field(default_factory=list)
    """The columns to keep, as Arrow arrays of n values."""

    def __len__(self) -> int:
        return len(self.labels)

    def slice(self, low: int, high: int) -> "Encoded":
        if low == 0 and high == len(self):
            return self
        columns, kept = [c.slice(low, high) for c in self.ids], [c.slice(low, high - low) for c in self.kept]
        return self._of(lambda array: array[low:high], columns, kept)

    def take(self, rows: np.ndarray) -> "Encoded":
        columns, kept = [c.take(rows) for c in self.ids], [c.take(pa.array(rows)) for c in self.kept]
        return self._of(lambda array: array.take(rows, axis=0), columns, kept)

    def _of(self, part: Callable[[np.ndarray], np.ndarray], ids: list[Column], kept: list[Any]) -> "Encoded":
        labels, dense, places = part(self.labels), part(self.dense), part(self.places)
        return replace(self, labels=labels, dense=dense, ids=ids, places=places, kept=kept)

    @classmethod
    def concat(cls, pieces: "Sequence[Encoded]") -> "Encoded":
        """Arrow arrays become of the first's type: files may store different ones."""
        if len(pieces) == 1:
            return pieces[0]
        kept = [[array.cast(arrays[0].type) for array in arrays] for arrays in zip(*(piece.kept for piece in pieces))]
        labels, dense, places = (
            np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("labels", "dense", "places")
        )
        ids = [Column.concat(columns) for columns in zip(*(piece.ids for piece in pieces))]
        return cls(labels, dense, ids, places, kept=[pa.concat_arrays(arrays) for arrays in kept])

    def batch(self, rows: np.ndarray, names: list[str]) -> Batch:
        bags = [column.bags(rows) for column in self.ids]
        values = np.empty(sum(each.ids for each in bags), np.int64)
        jagged: dict[str, Any] = {}
        if all(column.offsets is None for column in self.ids):
            for f, column in enumerate(self.ids):
                values[f * len(rows) : (f + 1) * len(rows)] = column.values.take(rows)
            jagged["offsets"] = torch.from_numpy(np.arange(len(values) + 1, dtype=np.int32))
        else:
            lengths = np.empty(sum(len(each.of) for each in bags), np.int64)
            id_, bag = 0, 0
            for column, each in zip(self.ids, bags, strict=True):
                column.fill(each, values[id_ : id_ + each.ids], lengths[bag : bag + len(each.of)])
                id_, bag = id_ + each.ids, bag + len(each.of)
            jagged["lengths"] = torch.from_numpy(lengths)
            if groups := grouped({name: each.inverse for name, each in zip(names, bags, strict=True)}):
                jagged |= {"strides": [len(each.of) for each in bags], "inverse": groups}
        labels = self.labels[:, 0] if self.labels.shape[1] == 1 else self.labels
        dense, labels = (torch.from_numpy(of.take(rows, axis=0)) for of in (self.dense, labels))
        return Batch(dense, KeyedJagged(names, torch.from_numpy(values), **jagged), labels)


def numbered(lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct lists among those of some rows, ascending, and the place of each row's among them (int32)."""
    low, end = (lists.min(), lists.max() + 1) if len(lists) else (0, 0)
    there = np.zeros(end - low, np.bool_)
    there[lists - low] = True
    return np.flatnonzero(there) + low, (np.cumsum(there, dtype=np.int32) - 1)[lists - low]


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


@kernel
def _copy_lists(values, offsets, lists, out, lengths):
    """Copy these lists to `out`, one after the other, and their sizes to `lengths`. Neighbours are copied at once."""
    at = k = 0
    while k < len(lists):
        if k + LISTS_AHEAD < len(lists):
            far = lists[k + LISTS_AHEAD]
            for j in range(offsets[far], offsets[far + 1], LINE):
                prefetch(values, j)
        begin = end = offsets[lists[k]]
        while k < len(lists) and offsets[lists[k]] == end:
            end = offsets[lists[k] + 1]
            lengths[k] = end - offsets[lists[k]]
            k += 1
        part, room = values[begin:end], out[at : at + end - begin]  # views: no check for index < 0
        for j in range(len(part)):
            room[j] = part[j]
        at += len(part)
