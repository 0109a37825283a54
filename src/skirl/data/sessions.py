"""Synthetic sessions: samples of one session repeat most of their lists, so that a batch can be deduplicated.

Sample n of the stream is a pure function of (seed, n), computed by going back to where its session began.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.find import find
from skirl.core.tables import Table
from skirl.data.files.hashing import fold, named, unit
from skirl.data.synthetic import (
    _DENSE,
    _HEAT,
    _IDS,
    _LABELS,
    _LENGTHS,
    _ROWS,
    DENSE_SIGNAL,
    SPARSE_SIGNAL,
    Drawn,
    Shape,
    Synthetic,
    _draw_dense,
    _draw_labels,
    bits_for,
    mass_of,
    rank_at,
    scatter,
)
from skirl.tools.jit import kernel

LENGTH = 75
"""Average ids of a list if `pooling_factor` is not set; each list has from two thirds to four thirds of the average."""
MOST_LISTS = 32
_STARTS, _CHANGES = 21, 22
ITEMS = 20_000
"""Rows of the tables of items, before `rows_scale`."""
_BASE = {"user": 50_000, "item": ITEMS}


@dataclass
class Sessions(Synthetic):
    """Batches from consecutive sessions: one user per session, an item per sample, and lists that change now and then.

    The first list looks up rows in the items' table. Batches hold repeated lists once, with an inverse, where that
    pays. The arguments are those of `Synthetic`, and:

    >>> batch = next(iter(Sessions(batch_size=64)))
    >>> batch.sparse.stride(), batch.sparse.stride_per_key()[0], max(batch.sparse.stride_per_key()[2:]) < 30
    (64, 64, True)
    """

    name: str = "sessions"
    per_session: float = 16.5
    change: float = 0.05
    histories: int = 3
    once: bool = True

    shapes: ClassVar[dict[str, Shape]] = {"sessions": Shape(_BASE, dense=4)}
    _identity: ClassVar[tuple[str, ...]] = (*Synthetic._identity, "per_session", "change", "histories")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.per_session <= 10_000:
            raise ValueError(f"per_session is {self.per_session}: set it between 1 and 10000")
        if not 0 <= self.change <= 1:
            raise ValueError(f"change is {self.change}: set it between 0 and 1")
        if not 1 <= self.histories <= MOST_LISTS:
            raise ValueError(f"lists is {self.histories}: set it between 1 and {MOST_LISTS}")

    @property
    def lists(self) -> tuple[str, ...]:
        return tuple(f"seen_{i}" for i in range(1, self.histories + 1))

    @cached_property
    def rows(self) -> dict[str, int]:
        sizes = _BASE | dict.fromkeys(self.lists[1:], ITEMS)
        return {name: max(10, round(rows * self.rows_scale)) for name, rows in sizes.items()}

    def tables(self, dim: int) -> list[Table]:
        features = {"item": ("item", self.lists[0])}
        return [Table(name, rows=rows, dim=dim, features=features.get(name, ())) for name, rows in self.rows.items()]

    def _samples_of(self, i: int, low: int, high: int) -> Batch:
        stream, first = named(self.seed, _IDS), i * self.batch_size + low
        dense, lengths, values, logits = self._draw_from(stream, first, high - low)
        labels = _draw_labels(named(stream, _LABELS), first, logits + self._bias)
        ids = KeyedJagged(["user", "item", *self.lists], torch.from_numpy(values), lengths=torch.from_numpy(lengths))
        return Batch(torch.from_numpy(dense), find(ids) if self.once else ids, torch.from_numpy(labels))

    def _draw(self, stream: np.uint64, samples: int, low: int, high: int) -> Drawn:
        return self._draw_from(stream, low, high - low)

    def _draw_from(self, stream: np.uint64, first: int, samples: int) -> Drawn:
        """Return dense features, bag lengths, ids and logits of samples first .. first + samples - 1 of a stream."""
        mean = self.pooling_factor if self.pooling_factor > 1 else LENGTH
        lengths = np.ones((2 + self.histories, samples), np.int64)
        begin = np.empty((2 + self.histories, samples), np.int64)
        """For each feature and sample: the sample at which its current list was drawn."""
        _follow(
            named(stream, _STARTS), named(stream, _CHANGES), named(stream, _LENGTHS), first, 1 / self.per_session,
            self.change, max(1, round(mean * 2 / 3)), max(1, round(mean * 4 / 3)), lengths, begin,
        )  # fmt: skip
        rows = np.array([self.rows[name] for name in ("user", "item", "item", *self.lists[1:])], np.int64)
        values = np.empty(lengths.sum(), np.int64)
        logits, dense = np.zeros(samples), np.empty((samples, self.dense_features), np.float32)
        signal = DENSE_SIGNAL / self.dense_features**0.5
        _draw_dense(named(stream, _DENSE), named(self._world, _DENSE), signal, first, dense, logits)
        signal, heat, hidden = SPARSE_SIGNAL / len(rows) ** 0.5, named(self._world, _HEAT), named(self._world, _ROWS)
        _fill(named(stream, _ROWS), heat, hidden, rows, lengths, begin, signal, values, logits)
        return dense, lengths.reshape(-1), values, logits


@kernel
def _follow(starts, changes, sizes, first, start, change, shortest, longest, lengths, begin):
    """Fill `lengths` and `begin` for each sample, starting where the first sample's session began."""
    features, samples = lengths.shape
    n = first
    while n > 0 and unit(starts, np.uint64(n)) >= start:
        n -= 1
    since = np.zeros(features, np.int64)
    opened = n
    while n < first + samples:
        new = n == opened or unit(starts, np.uint64(n)) < start
        for f in range(features):
            changed = unit(fold(changes, np.uint64(f)), np.uint64(n)) < change
            if new or f == 1 or (f > 1 and changed):
                since[f] = n
            if n >= first:
                begin[f, n - first] = since[f]
                if f > 1:
                    share = unit(fold(sizes, np.uint64(f)), np.uint64(since[f]))
                    lengths[f, n - first] = shortest + int(share * (longest - shortest + 1))
        n += 1


@kernel
def _fill(stream, heat, hidden, rows, lengths, begin, signal, values, logits):
    """Fill ids in order of (feature, sample, position in the list). A whole list adds to the logit as much as one id."""
    spread = 12.0**0.5  # scales a uniform weight to variance 1
    at = 0
    for f in range(len(rows)):
        word = np.uint64(f)
        table = np.uint64(max(1, f - 1) if f else 0)  # the first list shares the items' table
        draws, place, weights = fold(stream, word), fold(heat, table), fold(hidden, table)
        mass, bits = mass_of(rows[f]), bits_for(rows[f])
        for b in range(lengths.shape[1]):
            line = fold(draws, np.uint64(begin[f, b]))
            total, count = 0.0, lengths[f, b]
            for k in range(count):
                rank = rank_at(unit(line, np.uint64(k)), rows[f], mass)
                row = scatter(rank, rows[f], bits, place)
                values[at] = row
                total += unit(weights, np.uint64(row)) - 0.5
                at += 1
            logits[b] += signal * spread * total / max(1, count) ** 0.5
