"""One training step on its way: a batch, the Steps of its banks, the rows fetched for it.

One object goes through all stages and each fills in its part, so there is exactly one owner at any time and nothing is
looked up again by number. Separate messages between stages would be smaller and would have to be matched.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from skirl.core.ids import BankIds, Captured
from skirl.oracle.step import Step


@dataclass(slots=True)
class Micro:
    """One micro-batch: what the user's loop gets, and its ids."""

    batch: Any
    captured: Captured
    ids: list[BankIds] = field(default_factory=list)
    """One a bank, once resolved."""
    entered: bool = False
    """Its forward ran."""
    weights: torch.Tensor | None = None
    """Weights of the ids that want a gradient."""
    nbytes: int = 0
    """What the user's batch takes in memory."""
    loader_state: Any = None
    """The loader's own state after this batch, where it has one."""

    @property
    def count(self) -> int:
        """Ids of all banks."""
        return sum(ids.count for ids in self.ids)


@dataclass(slots=True)
class Work:
    """One step of one lookahead."""

    number: int
    micros: list[Micro]
    steps: list[Step] = field(default_factory=list)
    """One a bank."""
    fetched: list[Any] = field(default_factory=list)
    """One a bank: what it knows the records of `step.fetch_keys` by."""
    grads: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """By (bank, micro-batch): gradient of the pooled output, [bags, dim]."""
    live: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By (bank, micro-batch): which features got a gradient."""
    returned: int = 0
    """Micro-batches whose backward ran."""
    updated: bool = False

    def positions(self, bank: int, micro: int) -> slice:
        """Where a micro-batch's ids are among the step's."""
        begin = sum(m.ids[bank].count for m in self.micros[:micro])
        return slice(begin, begin + self.micros[micro].ids[bank].count)
