"""One training step on its way. One object goes through all stages, and each fills in its part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from skirl.core.ids import BankIds, Captured, Resolver
from skirl.core.item import Item
from skirl.core.positions import Positions
from skirl.core.tree import leaves
from skirl.engine.capacity import Split
from skirl.engine.kernels.tree import Parts
from skirl.oracle.halves import Reads
from skirl.oracle.step import Step


@dataclass(slots=True)
class Micro:
    """What one collection makes of a micro-batch."""

    captured: Captured
    positions: list[Positions]
    """By bank: its ids, checked."""
    ids: list[BankIds] = field(default_factory=list)
    """By bank: the same with their bags, once the step is planned."""
    entered: bool = False
    """Its forward ran,"""
    returned: bool = False
    """and its backward."""
    weights: torch.Tensor | None = None
    """Weights of the ids that want a gradient,"""
    weighted: Captured | None = None
    """and the ids as forward got them: its features may stand in another order."""

    @classmethod
    def of(cls, captured: Captured, resolver: Resolver) -> "Micro":
        """Ids that no window has seen: checked and resolved at once."""
        positions = resolver.positions(captured)
        return cls(captured, positions, resolver.resolve(captured, positions))


@dataclass(slots=True)
class Waiting:
    """Which vectors of one bank the loop waits for in a step of several trainers."""

    rows: np.ndarray
    """bool [rows]: of those that this trainer reads."""
    requests: np.ndarray
    """bool [requests]: of those for rows that it owns."""

    def others(self) -> "Waiting":
        """Those that it does not wait for."""
        return Waiting(~self.rows, ~self.requests)


def begins(taken: np.ndarray) -> np.ndarray:
    """Of each place, and of the end, how many before it are taken.

    >>> begins(np.array([True, False, True])).tolist()
    [0, 1, 1, 2]
    """
    out = np.zeros(len(taken) + 1, np.int64)
    np.cumsum(taken, out=out[1:])
    return out


@dataclass(slots=True)
class Work:
    """One step of one collection."""

    number: int
    micros: list[Micro]
    steps: Sequence[Step] = ()
    """By bank."""
    fetched: list[Any] = field(default_factory=list)
    """By bank: what it knows the records of `step.fetch_keys` by."""
    found: list[int] = field(default_factory=list)
    """By bank: how many of them the store had."""
    grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By (bank, micro-batch): gradient of the pooled output, [bags, dim]; with shared bags, theirs are behind it."""
    joint: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bank, where there are several micro-batches: the memory that all of its gradients are in."""
    apart: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bank: gradient of the shared bags, [shared bags, dim], where it is not behind that of the output."""
    live: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By (bank, micro-batch): which features got a gradient."""
    reads: Sequence[Reads] = ()
    """By bank, where rows have owners: what this trainer reads;"""
    serve: Sequence[np.ndarray] = ()
    """and int32 [trainers + 1], where each trainer's requests begin: then the Steps are over requests and not over ids."""
    returned: int = 0
    """Micro-batches whose backward ran."""
    updated: bool = False
    shards: int = 1
    """Of the step, whose gradient is the mean over them."""
    mine: range | None = None
    """Those that the micro-batches are; None: all."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bank, where rows have owners: the weights of the rows that this trainer reads."""
    values_wait: Sequence[Waiting] = ()
    """By bank: which values the step before changes; none: all are waited for."""
    gradients_wait: Sequence[Waiting] = ()
    """By bank: which gradients belong to rows that the step after uses or evicts; none: all are waited for."""
    made: dict[int, np.ndarray] = field(default_factory=dict)
    """By bank: records of new rows that were made before the step."""
    packs: dict[str, "Work"] = field(default_factory=dict)
    """Where several engines carry out one plan: the work of each, with the same Steps."""

    @property
    def begun(self) -> bool:
        """Whether a forward of it ran."""
        return any(micro.entered for micro in self.micros) or any(work.begun for work in self.packs.values())

    @property
    def changed_rows(self) -> bool:
        """Whether rows were updated by it."""
        return self.updated or any(work.updated for work in self.packs.values())

    def parts(self, bank: int) -> Parts:
        """Where each micro-batch's ids end among the step's, and which leaf of the tree it is."""
        ends = np.cumsum([m.ids[bank].count for m in self.micros])
        return Parts(ends, np.array(self.leaves))

    @property
    def leaves(self) -> list[int]:
        """The leaf of each micro-batch."""
        mine = range(self.shards) if self.mine is None else self.mine
        each = len(self.micros) // len(mine)
        return leaves(each * self.shards, self.shards)[mine.start * each : mine.stop * each]

    def groups(self, bank: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions of each row: where each row's begin in the second array."""
        of = self.reads[bank] if self.reads else self.steps[bank]
        return of.group_start, of.group_pos

    def place(self, bank: int) -> np.ndarray:
        """The row of each position: of the cache, or of the values that owners sent."""
        return self.reads[bank].place if self.reads else self.steps[bank].slots

    def keep(self, bank: int, micro: int, grad: torch.Tensor, empty: Callable[[int, int], torch.Tensor]) -> None:
        """Take a micro-batch's gradient; to a place beside those of the others, so that its maker may use its memory."""
        if len(self.micros) > 1:
            grad = self._beside(bank, micro, grad.shape[-1], empty).copy_(grad)
        self.grads[bank, micro] = grad

    def room(self, bank: int, micro: int, dim: int, empty: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Where a micro-batch's gradient is to be put, with that of its shared bags behind it."""
        alone = len(self.micros) == 1
        into = empty(self.micros[micro].ids[bank].bags, dim) if alone else self._beside(bank, micro, dim, empty)
        self.grads[bank, micro] = into
        return into

    def _beside(self, bank: int, micro: int, dim: int, empty: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """A micro-batch's part of the memory that all of them have."""
        bags = [m.ids[bank].bags for m in self.micros]
        if bank not in self.joint:
            self.joint[bank] = empty(sum(bags), dim)
        begin = sum(bags[:micro])
        return self.joint[bank][begin : begin + bags[micro]]

    def positions(self, bank: int, micro: int) -> slice:
        """Where a micro-batch's ids are among the step's."""
        begin = sum(m.ids[bank].count for m in self.micros[:micro])
        return slice(begin, begin + self.micros[micro].ids[bank].count)


@dataclass(slots=True)
class Flight:
    """One step of all collections of a model."""

    number: int
    items: list[Item]
    works: list[Work]
    """One for each collection."""
    splits: list[Split] | None = None
    """Of each collection: how its cache is split from this step on, where that changes."""

    @property
    def steps(self) -> list[Step]:
        """Of all banks of all collections."""
        return [step for work in self.works for step in work.steps]

    @property
    def begun(self) -> bool:
        """Whether a forward of it ran."""
        return any(work.begun for work in self.works)

    @property
    def updated(self) -> bool:
        """Whether rows were updated by it."""
        return any(work.changed_rows for work in self.works)
