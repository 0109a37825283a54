"""What trainers agree on about a batch, and the shards of a step."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from skirl.nn.collection import collections_of
from skirl.nn.dense_sums import DenseSums, check_sharded
from skirl.peers.base import Peers
from skirl.tools import rng_state


def check_weights(model: nn.Module, peers: Peers) -> None:
    """Raise if dense weights differ between trainers. All call this at the same time, between two steps."""
    named = [(name, w) for name, w in model.named_parameters() if not nn.parameter.is_lazy(w) and w.numel()]
    scale = np.array([_scale(collection.grad_scaler) for collection in collections_of(model).values()])
    mine = np.append(np.array([_digest(w) for _, w in named], np.uint64), scale.view(np.uint64))
    for rank, theirs in enumerate(peers.channel("lookups").exchange([mine] * peers.size, "dense weights")):
        if len(theirs) != len(mine):
            raise ValueError(
                f"the model has {len(named)} dense weights on rank {peers.rank} and {len(theirs) - len(scale)} on rank "
                f"{rank}: make the same model on all trainers"
            )
        if (theirs[len(named) :] != mine[len(named) :]).any():
            raise ValueError(
                f"grad_scaler of the embeddings has different scales on ranks {peers.rank} and {rank}: create it with the "
                "same settings on all trainers, or load it from the same checkpoint"
            )
        for n in np.flatnonzero(theirs != mine)[:1].tolist():
            raise ValueError(
                f"{named[n][0]} differs between ranks {peers.rank} and {rank}: begin with the same dense weights on all "
                "trainers, call torch.manual_seed(0) before you make the model"
            )


def _scale(scaler: Any) -> float:
    return 0.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())


def _digest(weight: torch.Tensor) -> int:
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw.tobytes(), digest_size=8).digest(), "little")


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
