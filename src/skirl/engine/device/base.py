"""What an engine asks of whatever holds one bank's cache and computes on it: host memory, or a GPU.

The engine decides nothing and neither does this: a Step says which rows come, go and change, and an implementation moves
them by its own means. Two of them: `host.py`, where all of it happens in the caller's thread when it is asked for, and
`gpu.py`, where it is put on streams and happens later. One class with a branch for each operation would be half as long,
and no reader could say of a line on which of the two it runs.

Rows and gradients are torch tensors of the device, ids and keys are numpy arrays of the host: it is the oracle's, which
plans on the host for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skirl.core.ids import BankIds
from skirl.core.initial import InitialTable
from skirl.core.optim import RowOptimizer
from skirl.engine.work import Work
from skirl.store.changes import Records


@dataclass(frozen=True)
class BankFacts:
    """What is the same for all steps of one bank."""

    number: int
    """Which of the schema's banks."""
    dim: int
    width: int
    """Numbers in a record: the weight and its optimizer's state; of half precision, words of two."""
    features: int
    """Rows of the output a sample; 1 where nothing is pooled."""
    dtype: np.dtype
    optimizer: RowOptimizer
    initial: InitialTable
    seed: int
    half: torch.dtype | None = None
    """What rows are held in, where it is not dtype."""


@dataclass(slots=True)
class Update:
    """What a backward brings: how the rows of a step change."""

    work: Work
    grads: list[torch.Tensor | None]
    """One a micro-batch: of the output, [bags, dim]."""
    live: np.ndarray
    """Which rows of the outputs have a gradient: by row % size."""
    scalars: np.ndarray
    """Of the optimizer, [tables, k]."""
    step: int
    """Counted from the run's first; decides how halves are rounded."""


def joined_scales(ids: Sequence[BankIds], dtype: np.dtype) -> np.ndarray:
    """Factors of all micro-batches' positions; ones where only some have them."""
    if not any(len(i.scale) for i in ids):
        return ids[0].scale
    return np.concatenate([i.scale if len(i.scale) else np.ones(i.count, dtype) for i in ids])


def joined_bags(ids: Sequence[BankIds]) -> np.ndarray:
    """The output's row of each position, the outputs of all micro-batches one after another."""
    if len(ids) == 1:
        return ids[0].bag_of
    starts = np.concatenate([[0], np.cumsum([i.bags for i in ids])])
    return np.concatenate([i.bag_of + start for i, start in zip(ids, starts[:-1])]).astype(np.int32)


class BankRows(ABC):
    """The cache of one bank, the buffers of rows on their way, and what is computed on them."""

    def __init__(self, facts: BankFacts) -> None:
        self.facts = facts

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Memory of the buffers of rows on their way, now."""

    @property
    @abstractmethod
    def buffers_in_use(self) -> int:
        """How many of them have an owner."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows held for a write-back or for forwarding."""

    @abstractmethod
    def allocate(self, slots: int, staging_rows: int) -> Records:
        """Make the cache; what was in one before is gone."""

    @abstractmethod
    def forget_moves(self) -> None:
        """All is written and nothing will be forwarded any more: let go of what is on its way."""

    # A step's way. `arriving` and `shipped` run in the fetch stage, `written` in the write stage, all else in the loop.

    @abstractmethod
    def arriving(self, work: Work) -> Any:
        """Room for what a step fetches; `room(arrival)` is where to read it to."""

    @abstractmethod
    def room(self, arrival: Any) -> np.ndarray:
        """The host's array that the fetched records are read into."""

    @abstractmethod
    def shipped(self, arrival: Any, work: Work) -> None:
        """They were read: send them on their way."""

    @abstractmethod
    def load(self, work: Work, arrival: Any) -> Any:
        """Evict, forward, put what was fetched, make what is new; gives what left."""

    @abstractmethod
    def landed(self, leaving: Any) -> np.ndarray:
        """The records of rows that left, on the host; waits for them."""

    @abstractmethod
    def written(self, leaving: Any) -> None:
        """They are in the store."""

    # Computing.

    @abstractmethod
    def pool(self, work: Work, micro: int) -> torch.Tensor:
        """The output of one micro-batch of the current step: [bags, dim]."""

    @abstractmethod
    def pool_rows(self, rows: np.ndarray, ids: BankIds, place: np.ndarray) -> torch.Tensor:
        """The same out of records given by the host: `place` is where each id's is."""

    @abstractmethod
    def update(self, update: Update) -> None:
        """Sum the gradients of every row of the current step and apply the optimizer once."""

    @abstractmethod
    def weight_grad(self, work: Work, micro: int, grad: torch.Tensor, live: np.ndarray) -> np.ndarray:
        """For each position the dot product of its bag's gradient with its row, before the row changes."""

    # Rows by their slots, for what is not training.

    @abstractmethod
    def read(self, slots: np.ndarray) -> np.ndarray:
        """Records of some slots, on the host."""

    @abstractmethod
    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Records from the host into some slots."""


class Device(ABC):
    """Makes the banks of one engine, and the memory of what they give out."""

    at: torch.device
    """Where the outputs are."""

    @abstractmethod
    def banks(self, facts: Sequence[BankFacts]) -> list[BankRows]:
        """One for each."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory for a cache that is free now."""

    @abstractmethod
    def empty(self, rows: int, dim: int) -> torch.Tensor:
        """Memory for an output or its gradient; its contents are undefined."""
