"""Rows of a batch that were looked up before the model asks for them."""

import threading
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from skirl.core.batch import Sparse
from skirl.core.ids import BankIds


@dataclass(slots=True)
class FoundRows:
    """What one bank has for a batch."""

    ids: BankIds
    rows: np.ndarray
    """Records, or their weights alone."""
    place: np.ndarray
    """Which of them each id has."""
    out: tuple[Tensor, Tensor | None] | None = None
    """The bank's output and its shared bags, where they were made early."""


LookedUp = list[FoundRows]


class Early(threading.local):
    """What the module takes next, in each thread."""

    found: "Found | None" = None


class Found:
    """What a thread looks up and the module takes.

    >>> import torch, skirl
    >>> ids = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7]]))
    >>> found = Found(ids)
    >>> found.give([])
    >>> found.taken, found.take(ids), found.taken, found.take(skirl.KeyedJagged.one_hot(["a"], torch.tensor([[7]])))
    (False, [], True, None)
    """

    def __init__(self, sparse: Sparse) -> None:
        self.taken = False
        """Whether the module asked for these ids,"""
        self.refused = False
        """and whether for others."""
        self._sparse, self._ids = sparse, len(sparse.values())
        self._there = threading.Event()
        self._looked_up: LookedUp = []
        self._error: BaseException | None = None

    def give(self, looked_up: LookedUp) -> None:
        """Here they are."""
        self._looked_up = looked_up
        self._there.set()

    def fail(self, error: BaseException) -> None:
        """They cannot be had; whoever takes them hears why."""
        self._error = error
        self._there.set()

    def take(self, sparse: Sparse) -> LookedUp | None:
        """The rows, waited for; None where they are of other ids, or of ids with weights, which may be made in the model."""
        if sparse is not self._sparse or len(sparse.values()) != self._ids or sparse.weights_or_none() is not None:
            self.refused = True
            return None
        self.taken = True
        self._there.wait()
        if self._error is not None:
            raise self._error
        return self._looked_up
