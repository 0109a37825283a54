"""Rows of files as numbers, of which batches are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import grouped
from skirl.data.files.column import Column
from skirl.data.files.schema import FileSchema


@dataclass
class Encoded:
    """Rows of a part of a file, without malformed ones."""

    labels: np.ndarray
    """float32 [n, labels]."""
    dense: np.ndarray
    """float32 [n, dense features]."""
    ids: list[Column]
    """By feature."""
    places: np.ndarray
    """int64 [n]: the index of each row in its part."""
    read: int = 0
    """Number of rows that were read, with those left out,"""
    bad: int = 0
    """of which so many were malformed,"""
    first_bad: int = -1
    """and the index in the part of the first of them; -1 if there are none."""
    kept: list[Any] = field(default_factory=list)
    """The kept columns, as Arrow arrays of n values."""
    sessions: np.ndarray | None = None
    """int64 [n]: a number for each row's session, if the order depends on sessions."""

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def nothing(cls, schema: FileSchema) -> "Encoded":
        """Return no rows."""
        none, begin = np.empty(0, np.int64), np.zeros(1, np.int64)
        labels, dense = (np.empty((0, width), np.float32) for width in (len(schema.labels), schema.dense_features))
        return cls(labels, dense, [Column(none, begin if column.list else None) for column in schema.ids], none)

    def expanded(self) -> "Encoded":
        """Return the same rows with a list for each row."""
        return replace(self, ids=[column.expanded() for column in self.ids])

    def slice(self, low: int, high: int) -> "Encoded":
        """Return rows low .. high - 1, as views."""
        if low == 0 and high == len(self):
            return self
        return replace(
            self,
            labels=self.labels[low:high],
            dense=self.dense[low:high],
            ids=[column.slice(low, high) for column in self.ids],
            places=self.places[low:high],
            kept=[column.slice(low, high - low) for column in self.kept],
            sessions=None if self.sessions is None else self.sessions[low:high],
        )

    def take(self, rows: np.ndarray) -> "Encoded":
        """Return these rows (int64), in this order."""
        return replace(
            self,
            labels=self.labels.take(rows, axis=0),
            dense=self.dense.take(rows, axis=0),
            ids=[column.take(rows) for column in self.ids],
            places=self.places[rows],
            kept=[column.take(pa.array(rows)) for column in self.kept],
            sessions=None if self.sessions is None else self.sessions[rows],
        )

    @classmethod
    def concat(cls, pieces: "Sequence[Encoded]") -> "Encoded":
        """Return the rows of several pieces. Arrow arrays become of the first's type: files may store different ones."""
        if len(pieces) == 1:
            return pieces[0]
        kept = [[array.cast(arrays[0].type) for array in arrays] for arrays in zip(*(piece.kept for piece in pieces))]
        sessions = [piece.sessions for piece in pieces if piece.sessions is not None]
        return cls(
            np.concatenate([piece.labels for piece in pieces]),
            np.concatenate([piece.dense for piece in pieces]),
            [Column.concat(columns) for columns in zip(*(piece.ids for piece in pieces))],
            np.concatenate([piece.places for piece in pieces]),
            kept=[pa.concat_arrays(arrays) for arrays in kept],
            sessions=np.concatenate(sessions) if sessions else None,
        )

    def batch(self, rows: np.ndarray, names: list[str]) -> Batch:
        """Return these rows (int64) as a batch, in this order. names: of the features."""
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
