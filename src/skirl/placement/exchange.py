"""A count, from ids, of what trainers would exchange in a step: rows or pooled vectors, and their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.ids import Captured, capture
from skirl.core.keys import ROW_BITS
from skirl.core.placement import Placement
from skirl.core.tables import Table

WAYS = ("rows", "hashed", "partial", "pooled")
"""Ways to exchange. rows: each row goes from an owner among its readers to the others; hashed: each row goes from the
owner that its hash names, as trainers do today; partial: each such owner sends the sum of its rows for each bag of the
other trainers that has any of them; pooled: a table's owner sends a vector for each bag of the other trainers."""
_FLOAT = 4


@dataclass(frozen=True)
class TableIds:
    """The ids that a batch looks up in one table.

    **Arguments**

    - `rows`: by trainer, the row of each id of its samples.
    - `bags`: by trainer, the number of bags.
    - `of`: by trainer, the bag of each id, from 0 on.
    - `samples`: by trainer, how many samples have each bag; None: one.
    """

    rows: Sequence[np.ndarray]
    bags: Sequence[int]
    of: Sequence[np.ndarray]
    samples: Sequence[np.ndarray] | None = None


class ExchangeCount:
    """A count of the vectors that cross between trainers: each on its way there and, as a gradient, on its way back.

    **Arguments**

    - `tables`: name and dim of each table.
    - `trainers`: number of trainers; each has an equal part of the samples.

    >>> exchange = ExchangeCount([("a", 4)], 2)
    >>> exchange.add([TableIds([np.array([1, 1, 2]), np.array([2, 3])], [2, 2], [np.array([0, 1, 1]), np.array([0, 1])])])
    >>> [exchange.vectors[way].tolist() for way in ("rows", "pooled")], exchange.facts()["tables"][0]["better"]
    ([[2], [4]], 'rows')
    """

    def __init__(self, tables: Sequence[tuple[str, int]], trainers: int) -> None:
        self.tables, self.trainers, self.batches = list(tables), trainers, 0
        self.vectors = {way: np.zeros(len(self.tables), np.int64) for way in WAYS}
        self._placement = Placement.even(trainers)

    def add(self, batch: Sequence[TableIds]) -> None:
        """Count one more batch.

        **Arguments**

        - `batch`: the ids of each table.
        """
        self.batches += 1
        for table, ids in enumerate(batch):
            mine = [np.unique(rows) for rows in ids.rows]
            asked = sum(map(len, mine))
            self.vectors["rows"][table] += 2 * (asked - len(np.unique(np.concatenate(mine))))
            owners = [self._placement.site_of(rows.astype(np.int64) | table << ROW_BITS) for rows in mine]
            own = sum(int(np.count_nonzero(of == trainer)) for trainer, of in enumerate(owners))
            self.vectors["hashed"][table] += 2 * (asked - own)
            self.vectors["partial"][table] += 2 * self._partial(table, ids)
            owner = table % self.trainers
            self.vectors["pooled"][table] += 2 * (sum(ids.bags) - ids.bags[owner])

    def _partial(self, table: int, ids: TableIds) -> int:
        """Count the sums that owners by hash send: one for each bag of another trainer with any of their rows."""
        sums = 0
        for trainer, (rows, bags) in enumerate(zip(ids.rows, ids.of, strict=True)):
            owners = self._placement.site_of(rows.astype(np.int64) | table << ROW_BITS)
            found, at = partial_sums(bags, owners, self.trainers)
            found = found[at != trainer]
            sums += len(found) if ids.samples is None else int(ids.samples[trainer][found].sum())
        return sums

    def facts(self) -> dict[str, Any]:
        """Return the bytes per step, by table and in total, and mark the better of rows and pooled vectors."""
        tables = []
        for n, (name, dim) in enumerate(self.tables):
            each = {way: float(self.vectors[way][n] * dim * _FLOAT / max(1, self.batches)) for way in WAYS}
            tables.append({"name": name, **each, "better": "rows" if each["rows"] <= each["pooled"] else "pooled"})
        total = {way: sum(of[way] for of in tables) for way in WAYS}
        best = sum(of[of["better"]] for of in tables)
        return {
            "trainers": self.trainers,
            "batches": self.batches,
            **total,
            "better": best,
            "vs_rows": best / total["rows"] if total["rows"] else 1.0,
            "vs_pooled": best / total["pooled"] if total["pooled"] else 1.0,
            "as_rows": sum(of["better"] == "rows" for of in tables),
            "as_pooled": sum(of["better"] == "pooled" for of in tables),
            "tables": tables,
        }


def partial_sums(bags: np.ndarray, at: np.ndarray, owners: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each bag with each owner of any of its rows, once: those are the sums that it is made of.

    **Arguments**

    - `bags`: the bag of each id.
    - `at`: the owner of its row.
    - `owners`: number of owners.

    >>> [of.tolist() for of in partial_sums(np.array([0, 0, 0, 1]), np.array([1, 1, 0, 1]), 2)]
    [[0, 0, 1], [0, 1, 1]]
    """
    bag, owner = np.divmod(np.unique(bags.astype(np.int64) * owners + at), owners)
    return bag, owner


def ids_of(sparse: Sparse, tables: Sequence[Table], trainers: int) -> list[TableIds]:
    """Return what a batch looks up in each table, by trainer. Each trainer has an equal stretch of the samples.

    **Arguments**

    - `sparse`: the ids.
    - `tables`: tables of the model.
    - `trainers`: number of trainers.
    """
    features = [feature for table in tables for feature in table.features]
    captured = capture(sparse, features, copy=False)
    edges = [captured.batch * n // trainers for n in range(trainers + 1)]
    bags = [end - begin for begin, end in pairwise(edges)]
    found = []
    for table in tables:
        each = [_of_feature(captured, captured.keys.index(feature), edges) for feature in table.features]
        rows, of, samples = [], [], []
        for n in range(trainers):
            mine = [part[n] for part in each]
            first = np.cumsum(
                [0, *(len(shared) for *_, shared in mine)]
            )  # bags of the next feature have numbers after these
            rows.append(np.concatenate([some for some, *_ in mine]))
            of.append(np.concatenate([bag + begin for (_, bag, _), begin in zip(mine, first[:-1], strict=True)]))
            samples.append(np.concatenate([shared for *_, shared in mine]))
        found.append(TableIds(rows, [n * len(table.features) for n in bags], of, samples))
    return found


def _of_feature(
    captured: Captured, place: int, edges: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each stretch of samples the rows that it looks up, the bag of each, and how many samples have each bag.

    A bag that several samples of a stretch share is there once.
    """
    starts = captured.starts(place)
    inverse = None if captured.inverse is None else captured.inverse.of[place]
    found = []
    for begin, end in pairwise(edges):
        if inverse is None:
            mine, shared = np.arange(begin, end), np.ones(end - begin, np.int64)
            rows = captured.values[starts[begin] : starts[end]]
        else:
            mine, shared = np.unique(inverse[begin:end], return_counts=True)
            parts = [captured.values[starts[bag] : starts[bag + 1]] for bag in mine.tolist()]
            rows = np.concatenate([np.empty(0, captured.values.dtype), *parts])
        found.append((rows, np.repeat(np.arange(len(mine)), starts[mine + 1] - starts[mine]), shared))
    return found
