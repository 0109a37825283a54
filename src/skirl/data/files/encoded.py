"""Rows of files as numbers."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.schema import FileSchema
from skirl.tools.jit import AHEAD, kernel, ones, prefetch, read_only

_ONE = np.uint64(1)


@dataclass
class Encoded:
    """An encoded piece of a file, from which batches are made; without malformed rows."""

    labels: np.ndarray
    """float32 [n, labels]."""
    dense: np.ndarray
    """float32 [n, dense features]."""
    ids: list[np.ndarray]
    """int64 or int32, for each feature."""
    lengths: list[np.ndarray | None]
    """int64 [n] for a feature with lists, None where each row has one id."""
    places: np.ndarray
    """int64 [n]: the index of each row in its part."""
    bad: int = 0
    """Number of malformed rows left out,"""
    first_bad: int = -1
    """and the index in the part of the first of them; -1 if there are none."""
    fingerprints: bool = False
    """True if `ids` are fingerprints of values, which an open vocabulary turns into rows."""
    kept: list[Any] = field(default_factory=list)
    """The kept columns, as Arrow arrays of n values."""
    inverses: list[np.ndarray | None] = field(default_factory=list)
    """int64 [n] for a feature whose lists are stored once for all rows that share them: the list of each row. None, or no
    entry at all, if each row has its own list."""
    sessions: np.ndarray | None = None
    """int64 [n]: a number for each row's session, if the order depends on sessions."""
    _begins: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.labels)

    def inverse(self, feature: int) -> np.ndarray | None:
        """Return the index of each row's list of a feature; None if each row has its own."""
        return self.inverses[feature] if self.inverses else None

    def begins(self, feature: int) -> np.ndarray:
        """Return where each list of a feature begins in its ids (int64). Summed up once."""
        if feature not in self._begins:
            sizes = self.lengths[feature]
            assert sizes is not None
            self._begins[feature] = np.cumsum(sizes) - sizes
        return self._begins[feature]

    def expanded(self) -> "Encoded":
        """Return the same rows with a list for each row."""
        if all(inverse is None for inverse in self.inverses):
            return self
        lists = [lists_at(self.ids[f], self.lengths[f], inverse) for f, inverse in enumerate(self.inverses)]
        ids, lengths = [ids for ids, _ in lists], [sizes for _, sizes in lists]
        return replace(self, ids=ids, lengths=lengths, inverses=[])


def lists_at(
    values: np.ndarray, sizes: np.ndarray | None, rows: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the ids and lengths of the lists `rows` (indices; None for all), in this order."""
    if rows is None:
        return values, sizes
    if sizes is None:
        return values[rows], None
    starts, own = np.cumsum(sizes) - sizes, sizes[rows]
    out = np.empty(int(own.sum()), values.dtype)
    gather_from(read_only(values), starts[rows], own, out)
    return out, own


def used(values: np.ndarray, sizes: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep only the lists that some row has. Return their ids, their lengths, and the list of each row."""
    which, kept = np.empty(len(inverse), np.int32), np.empty(len(inverse), np.int64)
    count, _, left = number_lists(inverse, sizes, np.arange(len(inverse)), which, kept)
    kept = kept[:count]
    begins = np.cumsum(sizes) - sizes
    begins, sizes = begins[kept], sizes[kept]
    first, end = (int(begins.min()), int((begins + sizes).max())) if count else (0, 0)
    if left == end - first:  # no unused lists between them
        return values[first:end], sizes, which.astype(np.int64)
    out = np.empty(left, values.dtype)
    gather_from(read_only(values), begins, sizes, out)
    return out, sizes, which.astype(np.int64)


@kernel
def gather_from(values, starts, sizes, out):
    """Copy the lists at `starts`, with these sizes, one after the other into `out`."""
    at = 0
    for k in range(len(starts)):
        part, own = values[starts[k] : starts[k] + sizes[k]], out[at : at + sizes[k]]  # views: no check for index < 0
        for j in range(len(part)):
            own[j] = part[j]
        at += sizes[k]


@kernel
def number_lists(inverse, sizes, rows, which, kept):
    """Number the lists that some of the rows have, in ascending order.

    Fills `which` with the new number of each row's list, and `kept` with the old number of each new one. Returns how many
    lists there are, the ids of the lists of all rows, and the ids of the lists that are kept.
    """
    if len(rows) == 0:
        return 0, 0, 0
    low = high = last = inverse[rows[0]]
    size = sizes[last]
    total = 0
    for i in range(len(rows)):  # mostly, a row has the list of the row before
        prefetch(inverse, rows[min(i + AHEAD, len(rows) - 1)])
        list_ = inverse[rows[i]]
        if list_ != last:
            low, high = min(low, list_), max(high, list_)
            last, size = list_, sizes[list_]
        total += size
        which[i] = list_  # replaced below
    bits = np.zeros(((high - low) >> 6) + 1, np.uint64)  # a bit for each list
    before = np.empty(len(bits), np.int64)
    last = -1
    for list_ in which:
        if list_ != last:
            bits[(list_ - low) >> 6] |= _ONE << np.uint64((list_ - low) & 63)
            last = list_
    count = left = 0
    for word in range(len(bits)):
        before[word] = count
        some = bits[word]
        while some:
            rest = some & (some - _ONE)
            kept[count] = low + (word << 6) + ones((some ^ rest) - _ONE)
            left += sizes[kept[count]]
            count += 1
            some = rest
    last = number = -1
    for i in range(len(rows)):
        if which[i] != last:
            last = which[i]
            k = last - low
            number = before[k >> 6] + ones(bits[k >> 6] & ((_ONE << np.uint64(k & 63)) - _ONE))
        which[i] = number
    return count, total, left


def nothing(schema: FileSchema) -> Encoded:
    """Return a piece without rows."""
    none = np.empty(0, np.int64)
    labels, dense = (np.empty((0, width), np.float32) for width in (len(schema.labels), schema.dense_features))
    return Encoded(
        labels,
        dense,
        [none] * len(schema.ids),
        [none if c.list else None for c in schema.ids],
        none,
        inverses=[none if c.run else None for c in schema.ids],
    )


def taken(piece: Encoded, rows: np.ndarray) -> Encoded:
    """Return some rows of a piece, in this order."""
    ids, lengths, inverses = [], [], []
    for f, (values, sizes) in enumerate(zip(piece.ids, piece.lengths)):
        inverse = piece.inverse(f)
        if inverse is None or sizes is None:
            values, sizes = lists_at(values, sizes, rows)
        elif len(rows) == len(piece):  # in another order
            inverse = inverse[rows]
        else:
            values, sizes, inverse = used(values, sizes, inverse[rows])
        ids.append(values)
        lengths.append(sizes)
        inverses.append(inverse)
    return replace(
        piece,
        labels=piece.labels.take(rows, axis=0),
        dense=piece.dense.take(rows, axis=0),
        ids=ids,
        lengths=lengths,
        places=piece.places[rows],
        kept=[column.take(pa.array(rows)) for column in piece.kept],
        inverses=inverses,
        sessions=None if piece.sessions is None else piece.sessions[rows],
    )
