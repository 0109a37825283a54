"""What one trainer of several does in a step: get the values of the rows that it reads from their owners, and give their
gradients back; and, as an owner, serve and apply those of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from skirl.core.placement import Placement
from skirl.core.tree import block_of, leaves_of, subtrees
from skirl.engine.device.base import BankRows, Sums, Update
from skirl.engine.kernels.tree import Parts
from skirl.engine.work import Work
from skirl.oracle.step import Step
from skirl.peers.base import Peers


class Exchange:
    """The exchanges of one engine's steps, all in the thread of the training loop.

    **Arguments**

    - `peers`: all trainers.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.placement = Placement.even(peers.size)
        """Who owns which rows."""
        self._channel = peers.channel("rows")

    def values(self, banks: Sequence[BankRows], work: Work) -> None:
        """The step's rows are resident: bring the values that this trainer reads."""
        for number, bank in enumerate(banks):
            serve, ask = np.diff(work.serve[number]), np.diff(work.reads[number].ask)
            work.values[number] = self._channel.swap(
                bank.values(work), serve.tolist(), ask.tolist(), tag="values of rows"
            )

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Of each key whether this trainer owns its row."""
        return self.placement.site_of(keys) == self.peers.rank

    def look_up(self, keys: np.ndarray, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The weights of some rows, as their owners have them now; all trainers ask at once, each for what it needs.

        read: gives records of rows that this trainer owns.
        """
        channel, owner = self.peers.channel("lookups"), self.placement.site_of(keys)
        asked = channel.exchange([keys[owner == rank] for rank in range(self.peers.size)], "rows to look up")
        mine = [np.ascontiguousarray(read(part)[:, :dim]) for part in asked]
        come = channel.exchange([part.reshape(-1) for part in mine], "rows that were looked up")
        out = np.empty((len(keys), dim), mine[0].dtype)
        for rank, part in enumerate(come):
            out[owner == rank] = part.reshape(-1, dim)
        return out

    def anywhere(self, raised: np.ndarray) -> np.ndarray:
        """Which tables got a gradient from any trainer; raised: those that got one here."""
        flags = torch.from_numpy(np.tile(raised.astype(np.uint8), (self.peers.size, 1)))
        self._channel.swap_parts(list(flags), list(flags), tag="tables with gradients")
        return np.asarray(flags.numpy().any(axis=0))

    def update(self, rows: BankRows, update: Update) -> None:
        """Send the sums of this trainer's shards to the owners, and apply what came for the rows of this one."""
        work, bank = update.work, rows.facts.number
        trees = [subtrees(block.start, block.stop) for block in _blocks(work, self.peers.size)]
        mine = trees[self.peers.rank]
        sent = [_marked(rows.sums(update, block)) for block in mine]
        ask, serve = np.diff(work.reads[bank].ask), np.diff(work.serve[bank])
        send = sent[0] if len(mine) == 1 else _by_owner(sent, work.reads[bank].ask)
        come = self._channel.swap(
            send, (ask * len(mine)).tolist(), [n * len(tree) for n, tree in zip(serve.tolist(), trees)],
            tag="gradients of rows",
        )  # fmt: skip
        given = Sums(come, ~((come[:, 0] == 0) & torch.signbit(come[:, 0])))
        ends = np.cumsum([n for n, tree in zip(serve, trees) for _ in tree])
        parts = Parts(ends, np.array([leaves.start for tree in trees for leaves in tree]))
        owned = work if len(ends) == self.peers.size else replace(work, steps=_spread(work, bank, trees))
        sums = rows.combined(owned, parts, given)
        rows.apply(work, sums, update.scalars, update.step, 1 / work.shards)


def _blocks(work: Work, size: int) -> list[range]:
    """The leaves of each trainer."""
    each = len(work.micros) // len(range(work.shards) if work.mine is None else work.mine)
    return [leaves_of(block_of(rank, size, work.shards), each) for rank in range(size)]


def _marked(sums: Sums) -> torch.Tensor:
    """Values that say which of them count: sums begin at +0, so that none of those that do is -0."""
    return sums.values.masked_fill_(~sums.counted[:, None], -0.0)


def _by_owner(sent: list[torch.Tensor], ask: np.ndarray) -> torch.Tensor:
    """The sums of several subtrees, those for one owner side by side."""
    return torch.cat([part[lo:hi] for lo, hi in zip(ask[:-1].tolist(), ask[1:].tolist()) for part in sent])


def _spread(work: Work, bank: int, trees: list[list[range]]) -> list[Step]:
    """The step of an owner, whose positions are the sums that came: several for a request of a trainer with several."""
    step, serve = work.steps[bank], work.serve[bank]
    rank = np.searchsorted(serve[1:], step.group_pos, side="right")
    times = np.array([len(tree) for tree in trees])
    counts = np.diff(serve).astype(np.int64)
    begins = np.concatenate([[0], np.cumsum(counts * times)])[rank]
    copies = times[rank]
    first = np.repeat(begins + step.group_pos - serve[rank], copies)
    which = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
    pos = first + which * np.repeat(counts[rank], copies)
    ends = np.concatenate([[0], np.cumsum(copies)])[step.group_start]
    steps = list(work.steps)
    steps[bank] = replace(step, group_start=ends.astype(np.int32), group_pos=pos.astype(np.int32))
    return steps
