"""Sums of gradients on their way from the trainers that read rows to the one that owns them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from skirl.engine.device.base import BankRows, Sums
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Work
from skirl.oracle.step import Step


def marked(sums: Sums) -> torch.Tensor:
    """Return values in which -0 marks sums that do not count. Sums begin at +0, so no sum that counts is -0."""
    if sums.counted.device.type == "cpu" and bool(sums.counted.all()):
        return sums.values  # nearly always; asking a GPU would mean waiting for it
    return sums.values.masked_fill_(~sums.counted[:, None], -0.0)


def by_owner(sums: Sequence[torch.Tensor], ask: np.ndarray) -> torch.Tensor:
    """Return the sums of several subtrees, with those for one owner next to each other."""
    if len(sums) == 1:
        return sums[0]
    return torch.cat([part[lo:hi] for lo, hi in zip(ask[:-1].tolist(), ask[1:].tolist()) for part in sums])


def apply(
    rows: BankRows, work: Work, trees: list[list[range]], come: torch.Tensor, scalars: np.ndarray, number: int
) -> None:
    """Apply what all trainers sent to this one, for each subtree of theirs, to the rows of a bank that it owns."""
    bank = rows.facts.number
    step, serve = work.steps[bank], work.serve[bank]
    first = come[:, 0].clone()  # contiguous: one pass over the vectors instead of three
    given = Sums(come, ~((first == 0) & torch.signbit(first)))
    ends = np.cumsum([n for n, tree in zip(np.diff(serve), trees) for _ in tree])
    parts = Parts(ends, np.array([leaves.start for tree in trees for leaves in tree]))
    spread = work if len(ends) == len(trees) else _with(work, bank, _spread(step, serve, trees))
    sums = rows.combined(spread, parts, given)
    rows.apply(work, sums, scalars, number, 1 / work.shards)


def _with(work: Work, bank: int, step: Step) -> Work:
    """Return the same work with another step for one bank."""
    steps = list(work.steps)
    steps[bank] = step
    return replace(work, steps=steps)


def _spread(step: Step, serve: np.ndarray, trees: list[list[range]]) -> Step:
    """Return an owner's step whose positions are the sums that came: one per request and subtree of its trainer."""
    rank = np.searchsorted(serve[1:], step.group_pos, side="right")
    times = np.array([len(tree) for tree in trees])
    counts = np.diff(serve).astype(np.int64)
    first_of = np.concatenate([[0], np.cumsum(counts * times)])[rank]
    copies = times[rank]
    first = np.repeat(first_of + step.group_pos - serve[rank], copies)
    which = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    pos = first + which * np.repeat(counts[rank], copies)
    ends = np.concatenate([[0], np.cumsum(copies)])[step.group_start]
    return replace(step, group_start=ends.astype(np.int32), group_pos=pos.astype(np.int32))
