"""One trainer's part in a step of several: it gets the values of the rows that it reads from their owners and sends
their gradients back; as an owner, it serves values and applies gradients for all."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from skirl.core.placement import Placement
from skirl.core.tree import block_of, leaves_of, subtrees
from skirl.engine.device.base import BankRows, Update
from skirl.engine.gradients import apply, by_owner, marked
from skirl.engine.work import Work
from skirl.peers.base import Peers, Swapping
from skirl.peers.job import trainers

log = logging.getLogger("skirl")


class Exchange:
    """The exchanges of one engine's steps, all in the thread of the training loop."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.placement = Placement.even(peers.size)
        """Which trainer owns which rows."""
        self._rows, self._host = peers.channel("rows"), peers.channel("lookups")

    def owns(self, keys: np.ndarray) -> np.ndarray:
        """Return for each key whether this trainer owns its row."""
        return self.placement.site_of(keys) == self.peers.rank

    def values(self, banks: Sequence[BankRows], work: Work) -> None:
        """Get the values that this trainer reads. The step's rows must be resident with all owners."""
        coming = []
        for number, bank in enumerate(banks):
            ask, serve = np.diff(work.reads[number].ask).tolist(), np.diff(work.serve[number]).tolist()
            coming.append(self._rows.begin_swap(bank.values(work), serve, ask, tag="values of rows"))
        work.values = {number: swap.wait() for number, swap in enumerate(coming)}

    def look_up(self, keys: np.ndarray, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the weights of some rows as their owners have them now. All trainers call this together.

        `read` returns records of rows that this trainer owns.
        """
        owner = self.placement.site_of(keys)
        asked = self._host.exchange([keys[owner == rank] for rank in range(self.peers.size)], "rows to look up")
        mine = [np.ascontiguousarray(read(part)[:, :dim]) for part in asked]
        come = self._host.exchange([part.reshape(-1) for part in mine], "rows that were looked up")
        out = np.empty((len(keys), dim), mine[0].dtype)
        for rank, part in enumerate(come):
            out[owner == rank] = part.reshape(-1, dim)
        return out

    def begin_anywhere(self, raised: np.ndarray) -> Swapping[Sequence[torch.Tensor]]:
        """Begin to tell the other trainers which tables got a gradient here."""
        flags = torch.from_numpy(np.tile(raised.astype(np.uint8), (self.peers.size, 1)))
        return self._host.begin_swap_parts(list(flags), list(flags.clone()), tag="tables with gradients")

    def anywhere(self, flags: Swapping[Sequence[torch.Tensor]]) -> np.ndarray:
        """Return which tables got a gradient from any trainer. `flags` is what `begin_anywhere` returned."""
        return np.any([part.numpy() for part in flags.wait()], axis=0)

    def sums(self, rows: BankRows, update: Update) -> list[torch.Tensor]:
        """Return the sums of the rows that this trainer reads, for each of its subtrees."""
        return [marked(rows.sums(update, block)) for block in self._trees(update.work)[self.peers.rank]]

    def update(self, updates: Sequence[tuple[BankRows, Update, Sequence[torch.Tensor]]]) -> None:
        """Send the sums of some banks to the owners of their rows, and apply those that come to the rows owned here."""
        coming = []
        for rows, update, sums in updates:
            work, bank, trees = update.work, rows.facts.number, self._trees(update.work)
            ask, serve = work.reads[bank].ask, work.serve[bank]
            counts = [n * len(tree) for n, tree in zip(np.diff(serve).tolist(), trees)]
            sent = (np.diff(ask) * len(sums)).tolist()
            swap = self._rows.begin_swap(by_owner(sums, ask), sent, counts, tag="gradients of rows")
            coming.append((rows, update, trees, swap))
        for rows, update, trees, swap in coming:
            apply(rows, update, trees, swap.wait())

    def _trees(self, work: Work) -> list[list[range]]:
        mine = range(work.shards) if work.mine is None else work.mine
        return trees_of(self.peers.size, work.shards, len(work.micros) // len(mine))


@lru_cache(maxsize=8)
def trees_of(size: int, shards: int, micros: int) -> list[list[range]]:
    """Return the subtrees of each trainer. `micros`: micro-batches of a shard."""
    blocks = [leaves_of(block_of(rank, size, shards), micros) for rank in range(size)]
    return [subtrees(block.start, block.stop) for block in blocks]


def exchange_with(at: torch.device) -> Exchange | None:
    """Return the exchange with the other trainers of this job; None if there are none. `at` is where rows are."""
    peers = trainers(str(at))
    if peers.size == 1:
        return None
    if at.type != "cpu":
        log.warning(
            "%d trainers on GPUs: this has not been run yet, check that `skirl launch -n 2 -- train` and one process give "
            "the same bits on your machine",
            peers.size,
        )
    return Exchange(peers)
