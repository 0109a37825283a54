"""One training step on its way, from its plan to its update: one object that each stage fills in, and its life."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from skirl.core.ids import BankIds, Ids
from skirl.core.tree import leaves
from skirl.engine.kernels.tree import Parts
from skirl.oracle.route import Reads
from skirl.oracle.step import Step


class State(IntEnum):
    """Where a step is. A step that ends before `APPLIED` has changed no row."""

    PLANNED = 0
    """Its rows may be on their way, or in their slots."""
    FORWARD = 1
    """A forward has looked them up."""
    APPLIED = 2
    """Its gradients are in its rows."""


@dataclass(slots=True)
class Work:
    """One step of one collection. A step of a model has one for each of its collections."""

    micros: list[Ids]
    number: int = -1
    steps: Sequence[Step] = ()
    asked: Sequence[BankIds] = ()
    """By bank, until it is planned: the ids of all micro-batches. If rows have owners, what all trainers ask of this one."""
    fetched: list[Any] = field(default_factory=list)
    """By bank: its handle for the records of `step.fetch_keys`."""
    found: list[int] = field(default_factory=list)
    grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By (bank, micro-batch): gradient of the pooled output, [bags, dim], followed by that of any shared bags."""
    joint: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bank, with several micro-batches: the memory that holds all of its gradients."""
    live: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    reads: Sequence[Reads] = ()
    """By bank, where rows have owners: what this trainer reads."""
    serve: Sequence[np.ndarray] = ()
    """By bank, where rows have owners: int32 [trainers + 1], where each trainer's requests begin. The Steps are then
    over requests and not over ids.
    """
    returned: int = 0
    """Number of micro-batches whose backward ran."""
    state: State = State.PLANNED
    shards: int = 1
    """Shards of the step. Its gradient is the mean over them."""
    mine: range = range(1)
    """The shards that these micro-batches belong to."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """By bank, where rows have owners: the weights of the rows that this trainer reads."""
    whole: dict[int, "Work"] = field(default_factory=dict)
    """By bank of tables that this trainer looks up for all: the step as if all micro-batches were its own."""
    pooled: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """By bank of tables that one trainer looks up for all: the output for each micro-batch."""
    pack: int = 0
    packs: dict[str, "Work"] = field(default_factory=dict)
    """By variant, if there are several: its own part of the step."""

    @property
    def begun(self) -> bool:
        return self.state >= State.FORWARD or any(work.begun for work in self.packs.values())

    @property
    def applied(self) -> bool:
        return self.state == State.APPLIED or any(work.applied for work in self.packs.values())

    def own(self, pack: int = 0) -> "Work":
        """Return a variant's part of the step: the same Steps and ids, with gradients of its own."""
        micros = [copy(ids) for ids in self.micros]
        return Work(micros, self.number, self.steps, shards=self.shards, mine=self.mine, state=self.state, pack=pack)

    def of(self, bank: int) -> "Work":
        """Return the step as the trainer computes it that has the bank's rows."""
        return self.whole.get(bank, self)

    def parts(self, bank: int) -> Parts:
        """Return where each micro-batch's ids end among the step's, and which leaf of the tree it is."""
        ends = np.cumsum([m.banks[bank].count for m in self.micros])
        return Parts(ends, np.array(self.leaves))

    @property
    def leaves(self) -> list[int]:
        each = len(self.micros) // len(self.mine)
        return leaves(each * self.shards, self.shards)[self.mine.start * each : self.mine.stop * each]

    def gradient(self, bank: int) -> torch.Tensor:
        return self.joint[bank] if bank in self.joint else self.grads[bank, 0]

    def live_rows(self, bank: int) -> np.ndarray:
        """Return a mask of the output rows that got a gradient: by feature if that is enough, else row by row."""
        none = np.zeros(len(self.micros[0].banks[bank].parts), np.bool_)
        masks = [self.live.get((bank, m), none) for m in range(len(self.micros))]
        ids = [m.banks[bank] for m in self.micros]
        if all(mask.all() for mask in masks):
            return np.ones(1, np.bool_)
        if ids[0].pooled and all((mask == masks[0]).all() and not one.shares for mask, one in zip(masks, ids)):
            return masks[0]
        return np.concatenate([one.by_bag(mask) for mask, one in zip(masks, ids, strict=True)])

    def groups(self, bank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of each row, as (start, positions): those of row i begin at start[i]."""
        of = self.reads[bank] if self.reads else self.steps[bank]
        return of.group_start, of.group_pos

    def place(self, bank: int) -> np.ndarray:
        return self.reads[bank].place if self.reads else self.steps[bank].slots

    def room(self, bank: int, micro: int, dim: int, empty: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Return the memory for a micro-batch's gradient, with room for that of its shared bags at the end. If there are
        several micro-batches, all are in one piece."""
        bags = [m.banks[bank].bags for m in self.micros]
        if len(bags) > 1 and bank not in self.joint:
            self.joint[bank] = empty(sum(bags), dim)
        begin = sum(bags[:micro])
        into = self.joint[bank][begin : begin + bags[micro]] if len(bags) > 1 else empty(bags[0], dim)
        self.grads[bank, micro] = into
        return into

    def positions(self, bank: int, micro: int) -> slice:
        begin = sum(m.banks[bank].count for m in self.micros[:micro])
        return slice(begin, begin + self.micros[micro].banks[bank].count)


@dataclass
class Counters:
    """Rows moved since the engine was made, counted when they move, and only those that the store had or took."""

    steps: int = 0
    fetched: int = 0
    forwarded: int = 0
    new: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
