"""Transfers between the host and a GPU: a step's fetched rows and its plan, and rows that leave."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from skirl.core.ids import BankIds
from skirl.engine.device.bags_of_samples import LAID, laid_out
from skirl.engine.device.packed_plan import Packed
from skirl.engine.device.pinned import Block
from skirl.engine.device.streams import Event
from skirl.engine.kernels.hot_rows import stretches_of
from skirl.engine.kernels.tree_plan import TreePlan
from skirl.engine.work import Work
from skirl.oracle.halves import Reads
from skirl.oracle.step import Step


@dataclass(eq=False)
class Arrival:
    """The data that a step brings to one bank: its fetched rows and its plan."""

    work: Work
    rows: Block
    plan: Block
    packed: Packed
    scales: list[np.ndarray]
    """The factors of each micro-batch as they were sent. The loop may set others."""
    forwards: list[tuple[int, int, int]]
    """For each step that rows are forwarded from: its number, and its first and end among the plan's forwarded rows."""
    shared_bags: torch.Tensor | None
    tree: TreePlan | None
    """The plan for the sums of several micro-batches."""
    came: Event | None = None
    views: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Departure:
    """Rows that left the cache in one step."""

    block: Block
    count: int


class OnItsWay:
    """Records that a checkpoint reads, on their way to the host."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, there: Event) -> None:
        self._host, self._device, self._there = host, device, there

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def landed(self) -> np.ndarray:
        self._there.synchronize()
        return self._host.numpy()


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)


def by_step(forward_step: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Return the order of forwarded rows by the step that evicted them, and where each step's rows are in it.

    >>> by_step(np.array([7, 5, 7]))
    (array([1, 0, 2]), [(5, 0, 1), (7, 1, 3)])
    """
    order = np.argsort(forward_step, kind="stable")
    numbers, starts = np.unique(forward_step[order], return_index=True)
    ends = np.append(starts, len(order))
    return order, [(int(n), int(lo), int(hi)) for n, lo, hi in zip(numbers, ends[:-1], ends[1:])]


def plan_of(
    step: Step, ids: list[BankIds], scale: np.ndarray, order: np.ndarray, bags: np.ndarray | None, tree: TreePlan | None,
    reads: Reads | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Return what the device needs to know of a step: about 20 bytes an id."""
    arrays = {
        "slots": step.slots,
        "keys": step.keys,
        "rows": step.rows,
        "group_start": step.group_start,
        "group_pos": step.group_pos,
        "stretches": stretches_of(step.group_start) if tree is None else tree.stretches,
        "evict_slots": step.evict_slots,
        "fetch_slots": step.fetch_slots,
        "forward_index": step.forward_index[order],
        "forward_slots": step.forward_slots[order],
        "new_keys": step.new_keys,
        "new_slots": step.new_slots,
        "scale": scale,
    }
    if reads is not None:
        arrays |= {"place": reads.place, "read_start": reads.group_start, "read_pos": reads.group_pos}
    if bags is not None:
        arrays["bag_of"] = bags
    if tree is not None:
        arrays["runs"] = tree.runs
    for micro, one in enumerate(ids):
        if one.folded is not None:
            arrays |= {f"{name} {micro}": array for name, array in laid_out(one).items()}
        elif not one.one_each:
            arrays[f"offsets {micro}"] = one.offsets
    return arrays


def of_micro(views: Mapping[str, torch.Tensor], micro: int) -> dict[str, torch.Tensor]:
    """Return a plan's arrays for the shared bags of a micro-batch; see `laid_out`."""
    return {name: views[f"{name} {micro}"] for name in LAID}
