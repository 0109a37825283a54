"""The rows that a run uses."""

from collections.abc import Iterable

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.ids import capture, positions_of
from skirl.core.tables import Schema, Table
from skirl.oracle.seen import Seen


class Touched:
    """Counts the distinct rows of the batches that are added.

    >>> import skirl, torch
    >>> touched = Touched([Table("a", rows=10, dim=2)])
    >>> touched.add(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[3], [4], [3]])))
    >>> touched.rows
    2
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.schema = Schema.of(list(tables))
        self._seen = Seen(self.schema)

    @property
    def rows(self) -> int:
        """Number of distinct rows so far."""
        return len(self._seen)

    def add(self, sparse: Sparse) -> None:
        """Add a batch."""
        self._seen.add(keys_of(sparse, self.schema))


def keys_of(sparse: Sparse, schema: Schema) -> np.ndarray:
    """Return the key of every id of a batch."""
    captured = capture(sparse, schema.features, copy=False)
    return np.concatenate([positions_of(captured, schema, bank).keys() for bank in range(len(schema.banks))])
