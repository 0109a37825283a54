"""Encoded rows of files, from which batches are made: arrays, and lists stored once for all rows that share them."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.core.shared import pays
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel, read_only


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
    starts: list[np.ndarray | None] = field(default_factory=list)
    """int64: where each list begins in a feature's ids, if lists may overlap. None, or no entry at all, if they are
    contiguous."""

    def __len__(self) -> int:
        return len(self.labels)

    def inverse(self, feature: int) -> np.ndarray | None:
        """Return the index of each row's list of a feature; None if each row has its own."""
        return self.inverses[feature] if self.inverses else None

    def start(self, feature: int) -> np.ndarray | None:
        """Return where each list of a feature begins in its ids; None if they are contiguous."""
        return self.starts[feature] if self.starts else None

    def apart(self, feature: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return a feature's ids with contiguous lists, and the length of each."""
        values, sizes, starts = self.ids[feature], self.lengths[feature], self.start(feature)
        return (values, sizes) if starts is None else lists_at(values, sizes, np.arange(len(starts)), starts)

    def expanded(self) -> "Encoded":
        """Return the same rows with a list for each row."""
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
    """Return the ids and lengths of the lists `rows`, in this order.

    rows: indices of lists; None for all. starts: where lists begin; None if they are contiguous.
    """
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
    """Copy the lists at `starts`, with these sizes, one after the other into `out`."""
    at = 0
    for k in range(len(starts)):
        part, own = values[starts[k] : starts[k] + sizes[k]], out[at : at + sizes[k]]  # views: no check for index < 0
        for j in range(len(part)):
            own[j] = part[j]
        at += sizes[k]


def used(
    values: np.ndarray, sizes: np.ndarray, inverse: np.ndarray, starts: np.ndarray | None, *, copy: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Keep only the lists that some row has.

    Return their ids, their lengths, the list of each row, and where lists begin (None if they are contiguous). copy: if
    unused lists lie between them, copy them into contiguous ones.
    """
    which, kept, begins = (np.empty(len(inverse), np.int64) for _ in range(3))
    count, first, end = _number_lists(inverse, sizes, which, kept, begins)
    kept, begins = kept[:count], begins[:count]
    sizes = sizes[kept]
    if starts is not None:
        starts = starts[kept]
        if count:
            first = int(starts.min())
            values, starts = values[first : int((starts + sizes).max())], starts - first
    elif sizes.sum() == end - first:  # no unused lists between them
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
    """Number the lists that some row has, in ascending order.

    Fills `which` with the new number of each row's list, `kept` with the old number of each new one, and `begins` with
    where each begins, if all lists are contiguous. Returns their number, where the first begins, and where the last ends.
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
    """Return a batch's rows, and the int32 inverses by the features that share each one.

    Lists are stored once where that pays, as `skirl.dedup.find` decides; the lists of other features once per row.
    """
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
        starts=[none if c.start else None for c in schema.ids],
    )


def taken(piece: Encoded, rows: np.ndarray) -> Encoded:
    """Return some rows of a piece, in this order."""
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
