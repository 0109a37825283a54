"""Rows of a batch that are looked up before the model asks for them."""

import threading
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from skirl.core.batch import Sparse
from skirl.core.ids import BankIds


@dataclass(slots=True)
class FoundRows:
    """The rows of one bank for a batch."""

    ids: BankIds
    rows: np.ndarray
    """Records, or only their weights."""
    place: np.ndarray
    """The index in `rows` of each id's row."""
    out: tuple[Tensor, Tensor | None] | None = None
    """The bank's output and its shared bags, if they were pooled early."""


LookedUp = list[FoundRows]


class Early(threading.local):
    """The lookup that the module takes next, separate for each thread."""

    found: "Found | None" = None


class Found:
    """A lookup that another thread makes and the module takes.

    >>> import torch, skirl
    >>> ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7]]))
    >>> found = Found(ids)
    >>> found.give([])
    >>> found.taken, found.take(ids), found.taken, found.take(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7]])))
    (False, [], True, None)
    """

    def __init__(self, sparse: Sparse) -> None:
        self.taken = False
        """True once the module has asked for these ids."""
        self.refused = False
        """True once the module has asked for other ids."""
        self._sparse, self._ids = sparse, len(sparse.values())
        self._there = threading.Event()
        self._looked_up: LookedUp = []
        self._error: BaseException | None = None

    def give(self, looked_up: LookedUp) -> None:
        """Provide the rows."""
        self._looked_up = looked_up
        self._there.set()

    def fail(self, error: BaseException) -> None:
        """Provide an error, which `take` raises."""
        self._error = error
        self._there.set()

    def take(self, sparse: Sparse) -> LookedUp | None:
        """Wait for the rows and return them. None for other ids, or ids with weights, which the model may have made."""
        if sparse is not self._sparse or len(sparse.values()) != self._ids or sparse.weights_or_none() is not None:
            self.refused = True
            return None
        self.taken = True
        self._there.wait()
        if self._error is not None:
            raise self._error
        return self._looked_up
