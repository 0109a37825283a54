"""Rows of files as numbers, and batches of them."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import pays
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


LISTS_AHEAD = 4
"""How many lists ahead a list is fetched into the processor's cache: one begins anywhere if rows are shuffled."""
LINE = 16
"""Ids of 32 bits in a line of the cache."""


class _Bags(NamedTuple):
    """The bags of a feature in a batch."""

    of: np.ndarray
    """int64: by bag, the index in the piece of its list, or of its row if each row has one id."""
    ids: int
    """Number of ids of all bags."""
    inverse: np.ndarray | None
    """int32 [rows]: the bag of each row; None if each row has a bag of its own."""


def batch_of(piece: Encoded, rows: np.ndarray, names: list[str]) -> Batch:
    """Return rows (int64) of a piece as a batch, in this order. names: of the features."""
    bags = [_bags_of(piece, f, rows) for f in range(len(names))]
    values = np.empty(sum(each.ids for each in bags), np.int64)
    jagged: dict[str, Any] = {}
    if all(sizes is None for sizes in piece.lengths):
        for f in range(len(names)):
            values[f * len(rows) : (f + 1) * len(rows)] = piece.ids[f].take(rows)
        jagged["offsets"] = torch.from_numpy(np.arange(len(values) + 1, dtype=np.int32))
    else:
        lengths = np.empty(sum(len(each.of) for each in bags), np.int64)
        id_, bag = 0, 0
        for f, each in enumerate(bags):
            own, sizes = values[id_ : id_ + each.ids], lengths[bag : bag + len(each.of)]
            if (of_lists := piece.lengths[f]) is None:
                own[:], sizes[:] = piece.ids[f].take(rows), 1
            else:
                _copy_lists(read_only(piece.ids[f]), piece.begins(f), of_lists, each.of, own, sizes)
            id_, bag = id_ + each.ids, bag + len(each.of)
        jagged["lengths"] = torch.from_numpy(lengths)
        if groups := _groups(bags, names):
            jagged |= {"strides": [len(each.of) for each in bags], "inverse": groups}
    labels = piece.labels[:, 0] if piece.labels.shape[1] == 1 else piece.labels
    dense, labels = (torch.from_numpy(of.take(rows, axis=0)) for of in (piece.dense, labels))
    return Batch(dense, KeyedJagged(names, torch.from_numpy(values), **jagged), labels)


def _bags_of(piece: Encoded, feature: int, rows: np.ndarray) -> _Bags:
    """Return the bags of a feature: a list of several rows is one bag if that pays, as `skirl.core.find` decides."""
    sizes, inverse = piece.lengths[feature], piece.inverse(feature)
    if sizes is None:
        return _Bags(rows, len(rows), None)
    if inverse is None:
        return _Bags(rows, int(sizes[rows].sum()), None)
    which, kept = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
    count, total, left = number_lists(inverse, sizes, rows, which, kept)
    return _Bags(kept[:count], left, which) if pays(total, left, len(rows)) else _Bags(inverse[rows], total, None)


def _groups(bags: list[_Bags], names: list[str]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the inverses of features that share bags, each once, by the names of the features that have it."""
    groups: list[tuple[list[str], _Bags]] = []
    for name, each in zip(names, bags, strict=True):
        if each.inverse is None:
            continue
        for shared, first in groups:
            if len(first.of) == len(each.of) and np.array_equal(first.inverse, each.inverse):  # type: ignore[arg-type]
                shared.append(name)
                break
        else:
            groups.append(([name], each))
    return {tuple(shared): torch.from_numpy(each.inverse) for shared, each in groups}


@kernel
def _copy_lists(values, begins, sizes, lists, out, lengths):
    """Copy these lists to `out`, one after the other, and their sizes to `lengths`. Neighbours are copied at once."""
    at = k = 0
    while k < len(lists):
        if k + LISTS_AHEAD < len(lists):
            far = lists[k + LISTS_AHEAD]
            for j in range(0, sizes[far], LINE):
                prefetch(values, begins[far] + j)
        begin = end = begins[lists[k]]
        while k < len(lists) and begins[lists[k]] == end:
            lengths[k] = sizes[lists[k]]
            end += lengths[k]
            k += 1
        part, own = values[begin:end], out[at : at + end - begin]  # views: no check for index < 0
        for j in range(len(part)):
            own[j] = part[j]
        at += len(part)
