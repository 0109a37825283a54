"""Sums of gradients on their way from the trainers that read rows to the one that owns them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from skirl.core.tree import block_of, leaves_of, subtrees
from skirl.engine.device.base import BankRows, Sums, Update
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Waiting, Work, begins
from skirl.oracle.step import Step
from skirl.peers.base import Channel, Swapping
from skirl.tools.jit import kernel


class Gradients:
    """The sums of one bank's rows in one step, or of some of them."""

    def __init__(
        self,
        rows: BankRows,
        update: Update,
        sent: Sequence[torch.Tensor],
        trees: list[list[range]],
        which: Waiting | None = None,
    ) -> None:
        bank = rows.facts.number
        self.rows, self._update, self._trees, self._sent, self._which = rows, update, trees, sent, which
        self._ask, self._serve = update.work.reads[bank].ask, update.work.serve[bank]
        if which is not None:
            self._ask, self._serve = begins(which.rows)[self._ask], begins(which.requests)[self._serve]

    def begin(self, channel: Channel, tag: str) -> Swapping:
        """Begin to send the sums to their owners."""
        sent, ask, serve = self._sent, np.diff(self._ask), np.diff(self._serve)
        if self._which is not None:
            rows = np.flatnonzero(self._which.rows).astype(np.int32)
            sent = [self.rows.picked(part, rows) for part in sent]
        send = sent[0] if len(sent) == 1 else _by_owner(sent, self._ask)
        self._sent = ()
        counts = [n * len(tree) for n, tree in zip(serve.tolist(), self._trees)]
        return channel.begin_swap(send, (ask * len(sent)).tolist(), counts, tag=tag)

    def bring(self, channel: Channel, tag: str) -> None:
        """Send the sums, and apply those that come."""
        self.apply(self.begin(channel, tag).wait())

    def apply(self, come: torch.Tensor) -> None:
        """Apply what all trainers sent to this one to the rows that it owns."""
        rows, update, serve, trees = self.rows, self._update, self._serve, self._trees
        first = come[:, 0].clone()  # contiguous: one pass over the vectors instead of three
        given = Sums(come, ~((first == 0) & torch.signbit(first)))
        ends = np.cumsum([n for n, tree in zip(np.diff(serve), trees) for _ in tree])
        parts = Parts(ends, np.array([leaves.start for tree in trees for leaves in tree]))
        step = update.work.steps[rows.facts.number]
        step = step if self._which is None else narrowed(step, self._which.requests)
        spread = step if len(ends) == len(trees) else _spread(step, serve, trees)
        sums = rows.combined(_with(update.work, rows, spread), parts, given)
        rows.apply(_with(update.work, rows, step), sums, update.scalars, update.step, 1 / update.work.shards)


def trees_of(work: Work, size: int) -> list[list[range]]:
    """Return the subtrees of each trainer."""
    return _trees(size, work.shards, len(work.micros) // len(range(work.shards) if work.mine is None else work.mine))


@lru_cache(maxsize=8)
def _trees(size: int, shards: int, micros: int) -> list[list[range]]:
    """Return the same, computed once for all steps of a run. `micros`: micro-batches of a shard."""
    blocks = [leaves_of(block_of(rank, size, shards), micros) for rank in range(size)]
    return [subtrees(block.start, block.stop) for block in blocks]


def marked(sums: Sums) -> torch.Tensor:
    """Return values in which -0 marks sums that do not count. Sums begin at +0, so no sum that counts is -0."""
    if sums.counted.device.type == "cpu" and bool(sums.counted.all()):
        return sums.values  # nearly always; asking a GPU would mean waiting for it
    return sums.values.masked_fill_(~sums.counted[:, None], -0.0)


def narrowed(step: Step, requests: np.ndarray) -> Step:
    """Return the step with only the rows of these requests. Only these requests are numbered.

    - `requests`: bool [requests]; the same for all requests of a row.
    """
    rows, positions = len(step.rows), len(step.group_pos)
    slots, pos = np.empty(positions, np.int32), np.empty(positions, np.int32)
    start, which = np.empty(rows + 1, np.int32), np.empty(rows, np.int32)
    rows, positions = _narrow(requests, step.slots, step.group_start, step.group_pos, slots, start, pos, which)
    which = which[:rows]
    return replace(
        step, slots=slots[:positions], keys=step.keys[which], rows=step.rows[which], group_start=start[: rows + 1],
        group_pos=pos[:positions],
    )  # fmt: skip


@kernel
def _narrow(requests, slots, group_start, group_pos, new_slots, new_start, new_pos, which):
    """Write the rows and requests that are left. Return how many there are of each."""
    number = np.empty(requests.size, np.int32)
    left = 0
    for i in range(requests.size):
        number[i] = left
        if requests[i]:
            new_slots[left] = slots[i]
            left += 1
    rows = at = 0
    for row in range(group_start.size - 1):
        begin, end = group_start[row], group_start[row + 1]
        if requests[group_pos[begin]]:
            which[rows] = row
            new_start[rows] = at
            rows += 1
            for i in range(begin, end):
                new_pos[at] = number[group_pos[i]]
                at += 1
    new_start[rows] = at
    return rows, left


def _with(work: Work, rows: BankRows, step: Step) -> Work:
    """Return the same work with another step for one bank."""
    bank, steps = rows.facts.number, list(work.steps)
    steps[bank] = step
    return replace(work, steps=steps)


def _by_owner(sent: Sequence[torch.Tensor], ask: np.ndarray) -> torch.Tensor:
    """Return the sums of several subtrees, with those for one owner next to each other."""
    return torch.cat([part[lo:hi] for lo, hi in zip(ask[:-1].tolist(), ask[1:].tolist()) for part in sent])


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
