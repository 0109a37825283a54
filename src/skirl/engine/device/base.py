"""What an engine asks of whatever holds one bank's cache and computes on it: host memory, or a GPU."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from skirl.core.ids import BankIds
from skirl.core.initial import InitialTable
from skirl.core.shared import Shared
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Work
from skirl.store.changes import Records

T = TypeVar("T")


@dataclass(frozen=True)
class BankFacts:
    """What is the same for all steps of one bank."""

    number: int
    """Which of the schema's banks."""
    dim: int
    width: int
    """Numbers in a record: the weight and its optimizer's state; of half precision, words of two."""
    features: int
    """Rows of the output for each sample; 1 where nothing is pooled."""
    dtype: np.dtype
    kind: int
    """Of the row optimizer, whose numbers may differ by table."""
    initial_state: float
    """The first value of every number of a row's state."""
    clips: bool
    """Whether the gradient of some table is clipped."""
    initial: InitialTable
    seed: int
    half: torch.dtype | None = None
    """What rows are held in, if not in dtype."""


@dataclass(slots=True)
class Update:
    """What a backward brings to change the rows of a step."""

    work: Work
    grads: torch.Tensor
    """Of the outputs of all micro-batches, one after another: [bags, dim]; undefined where nothing is live."""
    live: np.ndarray
    """Which rows of the outputs have a gradient: by row % size."""
    scalars: np.ndarray
    """Of each table, the numbers of its optimizer: [tables, k]."""
    step: int
    """Counted from the start of the run; part of the seed by which halves are rounded."""
    apart: torch.Tensor | None = None
    """Gradients of the shared bags, where they are not behind `grads`."""


@dataclass(slots=True)
class Sums:
    """Gradients of a step, summed by row, or of a part of it."""

    values: torch.Tensor
    """[rows, dim]; zeros where nothing counted."""
    counted: torch.Tensor
    """bool [rows]: whether a position of the row had a gradient. A row without is not updated."""


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
    """The cache of one bank, the buffers of rows on their way, and what is computed on them.

    Rows and gradients are torch tensors on the device; ids and keys are numpy arrays on the host, where the oracle plans.
    """

    def __init__(self, facts: BankFacts) -> None:
        self.facts = facts

    @property
    @abstractmethod
    def staging_bytes(self) -> int:
        """Memory of the buffers of rows on their way, now."""

    @property
    @abstractmethod
    def buffers_in_use(self) -> int:
        """How many of these buffers have an owner."""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows held for a write-back or for forwarding."""

    @abstractmethod
    def allocate(self, slots: int, staging_rows: int) -> Records:
        """Make the cache; the one before is gone. staging_rows: how many rows free buffers may hold."""

    @abstractmethod
    def forget_moves(self) -> None:
        """Everything is written and nothing will be forwarded: release what is on its way."""

    # The way of a step. `arriving` and `shipped` run in the fetch stage, `written` in the write stage, the rest in the loop.

    @abstractmethod
    def arriving(self, work: Work) -> Any:
        """Make room for what a step fetches; `room(arrival)` is where to read it to."""

    @abstractmethod
    def room(self, arrival: Any) -> np.ndarray:
        """The host's array that the fetched records are read into."""

    @abstractmethod
    def shipped(self, arrival: Any, work: Work) -> None:
        """The records were read: send them to the device."""

    @abstractmethod
    def load(self, work: Work, arrival: Any) -> Any:
        """Evict, forward, put what was fetched, make new rows; returns the rows that leave."""

    @abstractmethod
    def landed(self, leaving: Any) -> np.ndarray:
        """The records of rows that left, on the host; waits until they are there."""

    @abstractmethod
    def written(self, leaving: Any) -> None:
        """The rows that left are in the store."""

    # Computing.

    @abstractmethod
    def pool(self, work: Work, micro: int) -> torch.Tensor:
        """The output of one micro-batch of the current step: [bags, dim], shared bags behind the samples' rows."""

    @abstractmethod
    def pool_rows(self, rows: np.ndarray, ids: BankIds, place: np.ndarray) -> torch.Tensor:
        """The same, out of records on the host; place: which record each id has."""

    @abstractmethod
    def fold(self, shared: Shared, grad: torch.Tensor | None, into: torch.Tensor) -> None:
        """Put the gradients of shared bags to `into`, [shared bags, dim]: sums over their samples, ascending, from 0.

        **Arguments**

        - `shared`: which sample has which bag.
        - `grad`: of the samples' rows, [batch * features, dim]; None: they have none.
        - `into`: as said.
        """

    @property
    def reads_apart(self) -> bool:
        """Whether `update` may get the gradients of shared bags apart from the others."""
        return False

    @abstractmethod
    def update(self, update: Update) -> None:
        """Sum the gradients of every row of the current step and apply the optimizer once.

        That is `apply` of `sums`; in one pass where a step has one micro-batch.
        """

    # The two halves of an update, with room between them for the sums of others.

    moves_ahead = False
    """Whether `values_ahead` and `apply` of other steps may run while a step computes: then it has the three below it.

    That is by another thread, or, where the device `issues_moves`, by the loop's, `aside`.
    """

    def branch(self) -> None:
        """What is moved aside from here on finds rows as they are now."""
        return

    def aside(self, work: Callable[..., T], *args: Any) -> T:
        """Have the device do this beside what it computes."""
        return work(*args)

    def join(self) -> None:
        """What was moved aside is done before what follows."""
        return

    @abstractmethod
    def values(self, work: Work, which: np.ndarray | None = None) -> torch.Tensor:
        """The weights of the current step's rows, one for each position, or for each in `which`: [positions, dim]."""

    def values_ahead(self, work: Work, which: np.ndarray | None = None) -> torch.Tensor:
        """The same before the step's `load`, of rows that the step in the loop does not change."""
        raise NotImplementedError

    def picked(self, vectors: torch.Tensor, which: np.ndarray) -> torch.Tensor:
        """Some of these vectors; which: int32."""
        raise NotImplementedError

    def place(self, into: torch.Tensor, which: np.ndarray, vectors: torch.Tensor) -> None:
        """Put vectors to `into[which]`; which: int32, distinct."""
        raise NotImplementedError

    @abstractmethod
    def sums(self, update: Update, block: range | None = None) -> Sums:
        """The gradients of every row: of each micro-batch, then over their tree; of the leaves in `block` alone."""

    @abstractmethod
    def combined(self, work: Work, parts: Parts, given: Sums) -> Sums:
        """The sums of every row out of partial ones: `given` has one for each position, `parts` says of which subtree."""

    @abstractmethod
    def apply(self, work: Work, sums: Sums, scalars: np.ndarray, step: int, times: float = 1.0) -> None:
        """Give every row's sum, times a factor, to the optimizer. scalars, step: as in `Update`."""

    @abstractmethod
    def weight_grad(self, work: Work, micro: int, grad: torch.Tensor, live: np.ndarray) -> np.ndarray:
        """For each position, the dot product of its bag's gradient and its row before the update."""

    # Rows by their slots, for everything but training.

    @abstractmethod
    def read(self, slots: np.ndarray) -> np.ndarray:
        """Records of some slots, on the host."""

    @abstractmethod
    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        """Records from the host into some slots."""


class Device(ABC):
    """Makes the banks of one engine, and memory for their outputs."""

    at: torch.device
    """Where the outputs are."""
    by_any_thread = False
    """Whether another thread than the one that computes may pool rows."""
    issues_moves = False
    """Whether the loop's thread gives it what travels between trainers while a step computes, on a stream of its own."""

    @abstractmethod
    def banks(self, facts: Sequence[BankFacts]) -> list[BankRows]:
        """One bank for each."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes free now for a cache."""

    @abstractmethod
    def empty(self, rows: int, dim: int) -> torch.Tensor:
        """Memory for an output or its gradient; its contents are undefined."""
