"""Batches of the rows of files."""

from typing import Any, NamedTuple

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import pays
from skirl.data.files.encoded import Encoded, number_lists
from skirl.tools.jit import kernel, prefetch, read_only

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
