"""Rows of files as batches are made of them: arrays, and lists that are here once for all rows that have them."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.core.shared import pays
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel, read_only


@dataclass
class Encoded:
    """A piece of a file as batches are made of it; malformed rows are gone."""

    labels: np.ndarray
    """float32 [n, labels]."""
    dense: np.ndarray
    """float32 [n, dense features]."""
    ids: list[np.ndarray]
    """int64 or int32, of each feature."""
    lengths: list[np.ndarray | None]
    """int64 [n] for a feature with lists, None where each row has one id."""
    places: np.ndarray
    """int64 [n]: which row of its part each is."""
    bad: int = 0
    """Rows left out,"""
    first_bad: int = -1
    """and which row of the part the first of them is; -1: there is none."""
    fingerprints: bool = False
    """`ids` are fingerprints of values that an open vocabulary turns into rows."""
    kept: list[Any] = field(default_factory=list)
    """Arrow arrays of n values, of the columns that are kept."""
    inverses: list[np.ndarray | None] = field(default_factory=list)
    """int64 [n] for a feature whose lists are here once for all rows that have them: which one each row has. None, or no
    entry at all: each row has its own."""
    sessions: np.ndarray | None = None
    """int64 [n]: what stands for each row's session, where the order needs it."""
    starts: list[np.ndarray | None] = field(default_factory=list)
    """int64, where each list begins among a feature's ids, if lists lie over each other. None, or no entry at all: they lie
    one after the other."""

    def __len__(self) -> int:
        return len(self.labels)

    def inverse(self, feature: int) -> np.ndarray | None:
        """Which of a feature's lists each row has; None: its own."""
        return self.inverses[feature] if self.inverses else None

    def start(self, feature: int) -> np.ndarray | None:
        """Where a feature's lists begin among its ids; None: one after the other."""
        return self.starts[feature] if self.starts else None

    def apart(self, feature: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A feature's ids with lists one after the other, and the length of each."""
        values, sizes, starts = self.ids[feature], self.lengths[feature], self.start(feature)
        return (values, sizes) if starts is None else lists_at(values, sizes, np.arange(len(starts)), starts)

    def expanded(self) -> "Encoded":
        """The same with a list for each row."""
        if all(inverse is None for inverse in self.inverses):
            return self
        lists = [
            lists_at(self.ids[f], self.lengths[f], inverse, self.start(f)) for f, inverse in enumerate(self.inverses)
        ]
        ids, lengths = [ids for ids, _ in lists], [sizes for _, sizes in lists]
        return replace(self, ids=ids, lengths=lengths, inverses=[], starts=[])


def lists_at(
    values: np.ndarray, sizes: np.ndarray | None, rows: np.ndarray | None, starts: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Lists at these places, in this order: their ids, and the length of each. rows: None for all; starts: where lists
    begin, unless one after the other."""
    if rows is None:
        return values, sizes
    if sizes is None:
        return values[rows], None
    if starts is None:
        starts = np.cumsum(sizes) - sizes
    own = sizes[rows]
    out = np.empty(int(own.sum()), values.dtype)
    gather_from(read_only(values), starts[rows], own, out)
    return out, own


@kernel
def gather_from(values, starts, sizes, out):
    """Copy values that lie at these places, one list after the other."""
    at = 0
    for k in range(len(starts)):
        part, own = values[starts[k] : starts[k] + sizes[k]], out[at : at + sizes[k]]  # as views: no place is negative
        for j in range(len(part)):
            own[j] = part[j]
        at += sizes[k]


def used(
    values: np.ndarray, sizes: np.ndarray, inverse: np.ndarray, starts: np.ndarray | None, *, copy: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Only the lists that some row has, which each has of them, and where they begin, unless one after the other. copy:
    where there are others between them, put them one after the other."""
    which, kept, begins = (np.empty(len(inverse), np.int64) for _ in range(3))
    count, first, end = _number_lists(inverse, sizes, which, kept, begins)
    kept, begins = kept[:count], begins[:count]
    sizes = sizes[kept]
    if starts is not None:
        starts = starts[kept]
        if count:
            first = int(starts.min())
            values, starts = values[first : int((starts + sizes).max())], starts - first
    elif sizes.sum() == end - first:  # nothing between them
        values = values[first:end]
    elif not copy:
        values, starts = values[first:end], begins - first
    else:
        out = np.empty(int(sizes.sum()), values.dtype)
        gather_from(read_only(values), begins, sizes, out)
        values = out
    return values, sizes, which, starts


@kernel
def _number_lists(inverse, sizes, which, kept, begins):
    """Number the lists that some row has, ascending.

    Out: which, the new number of each row's; kept, which lists these are; begins, where each begins, if they lie one after
    the other. How many they are, where the first of them begins, and where the last one ends.
    """
    if len(inverse) == 0:
        return 0, 0, 0
    low, high = inverse[0], inverse[0]
    for list_ in inverse:
        low, high = min(low, list_), max(high, list_)
    numbers = np.zeros(high + 1 - low, np.int64)
    for list_ in inverse:
        numbers[list_ - low] = 1
    first = 0
    for size in sizes[:low]:
        first += size
    count, at = 0, first
    for k in range(len(numbers)):
        if numbers[k]:
            kept[count], begins[count], numbers[k] = low + k, at, count
            count += 1
        at += sizes[low + k]
    for i in range(len(inverse)):
        which[i] = numbers[inverse[i] - low]
    return count, first, at


def sharing(piece: Encoded, names: list[str]) -> tuple[Encoded, dict[tuple[str, ...], np.ndarray]]:
    """A batch's rows with lists here once where that pays, as `skirl.dedup.find` decides it, where they lie; and the
    inverse, int32, by features that share it."""
    if all(inverse is None for inverse in piece.inverses):
        return piece, {}
    ids, lengths, starts, groups = list(piece.ids), list(piece.lengths), list(piece.starts), {}
    for f, name in enumerate(names):
        inverse, sizes = piece.inverse(f), piece.lengths[f]
        if inverse is None or sizes is None:
            continue
        total, left = int(sizes[inverse].sum()), int(sizes.sum())
        if pays(total, left, len(piece)):
            groups.setdefault(inverse.astype(np.int32).tobytes(), []).append(name)
        else:
            ids[f], lengths[f] = lists_at(piece.ids[f], sizes, inverse, piece.start(f))
            if starts:
                starts[f] = None
    found = {tuple(of): np.frombuffer(bytearray(raw), np.int32) for raw, of in groups.items()}
    return replace(piece, ids=ids, lengths=lengths, inverses=[], starts=starts), found


def nothing(schema: FileSchema) -> Encoded:
    """A piece without a row."""
    none = np.empty(0, np.int64)
    labels, dense = (np.empty((0, width), np.float32) for width in (len(schema.labels), schema.dense_features))
    return Encoded(
        labels,
        dense,
        [none] * len(schema.ids),
        [none if c.list else None for c in schema.ids],
        none,
        inverses=[none if c.run else None for c in schema.ids],
        starts=[none if c.start else None for c in schema.ids],
    )


def taken(piece: Encoded, rows: np.ndarray) -> Encoded:
    """Some rows of a piece, in this order."""
    ids, lengths, inverses, starts = [], [], [], []
    for f, (values, sizes) in enumerate(zip(piece.ids, piece.lengths)):
        inverse, start = piece.inverse(f), piece.start(f)
        if inverse is None or sizes is None:
            values, sizes = lists_at(values, sizes, rows)
        elif len(rows) == len(piece):  # in another order
            inverse = inverse[rows]
        else:
            values, sizes, inverse, start = used(values, sizes, inverse[rows], start)
        starts.append(start)
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
        starts=starts,
    )
