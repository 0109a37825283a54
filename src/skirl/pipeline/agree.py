"""What trainers agree on about a batch, and the shards of a step."""

import hashlib

import numpy as np
import torch
from torch import nn

from skirl.nn.collection import collections_of
from skirl.nn.dense_sums import DenseSums, check_sharded
from skirl.peers.base import Peers
from skirl.tools import rng_state


def check_weights(model: nn.Module, peers: Peers) -> None:
    """Raise if dense weights, or scales of GradScalers, differ between trainers. All call this at once, between steps."""
    mine = {name: _digest(w) for name, w in model.named_parameters() if not nn.parameter.is_lazy(w) and w.numel()}
    for name, collection in collections_of(model).items():
        scaler = collection.grad_scaler
        mine[f"grad_scaler of {name!r}"] = str(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else ""
    for rank, theirs in enumerate(peers.channel("lookups").told(mine, "dense weights")):
        if wrong := next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None):
            raise ValueError(
                f"{wrong} differs between ranks {peers.rank} and {rank}: begin with the same model and GradScaler on all "
                "trainers, and call torch.manual_seed(0) before you make the model"
            )


def _digest(weight: torch.Tensor) -> str:
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=8).hexdigest()


class ShardsInLoop:
    """Random numbers and dense gradients of steps with shards, as micro-batches enter the loop and leave it."""

    def __init__(self, model: nn.Module, shards: int, accumulate: int, seed: int, mine: range, peers: Peers) -> None:
        self._model, self.peers = model, peers
        self._seed = seed
        self._first = mine.start * accumulate
        self.dense = DenseSums(model, shards, accumulate, mine, peers)

    def check(self) -> None:
        check_sharded(self._model)
        if self.peers.size > 1:
            check_weights(self._model, self.peers)

    def close(self) -> None:
        rng_state.swap_out()
        self.dense.close()

    def begin(self, step: int, micro: int) -> None:
        self.dense.begin(micro)
        rng_state.swap_in(self._seed, step, self._first + micro)

    def left(self, step: int, micro: int | None) -> None:
        """End the loop on all trainers after the same step: each tells the others its own; within a step it ends the job."""
        peers = self.peers
        if peers.size == 1:
            return
        if micro is not None:
            why = (
                f"rank {peers.rank} left its loop in micro-batch {micro} of step {step:,} while other trainers go on with "
                "that step: leave the loop only when batches.ends_step is true, after the same step on all trainers"
            )
            peers.fail(why)
            raise RuntimeError(why)
        come = peers.channel("lookups").exchange([np.array([step])] * peers.size, "the end of a loop")
        for rank, (theirs,) in enumerate(come):
            if theirs != step:
                raise RuntimeError(
                    f"rank {peers.rank} left its loop after step {step:,} and rank {rank} after step {theirs:,}: leave "
                    "loops after the same step on all trainers"
                )

    def leave(self) -> None:
        """Let the micro-batch leave the loop. What comes next, such as reading the loader, draws the run's own numbers."""
        rng_state.swap_out()
        self.dense.leave()
