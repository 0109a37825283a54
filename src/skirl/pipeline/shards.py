"""The shards of a step in the loop: their dense gradients, and random numbers that do not depend on who computes them."""

from torch import nn

from skirl.nn.dense_sums import DenseSums, check_sharded
from skirl.peers.base import Peers
from skirl.pipeline.agree import check_weights, leave
from skirl.tools import rng_state


class ShardsInLoop:
    """Does what is needed as micro-batches of steps with shards enter the loop and leave it."""

    def __init__(
        self, model: nn.Module, shards: int, accumulate: int, seed: int, mine: range, peers: Peers | None = None
    ) -> None:
        self._model, self._peers = model, peers
        self._seed = seed
        self._first = mine.start * accumulate
        self._dense = DenseSums(model, shards, accumulate, mine, peers)

    def check(self) -> None:
        """Raise if the model's results depend on who computes which shard, or if it differs between trainers."""
        check_sharded(self._model)
        if self._peers is not None:
            check_weights(self._model, self._peers)

    def open(self) -> None:
        """Begin a pass."""
        self._dense.open()

    def close(self) -> None:
        """End the pass."""
        rng_state.swap_out()
        self._dense.close()

    def comes(self, step: int) -> None:
        """Let what other trainers are told from here on be for this step."""
        if self._peers is not None:
            self._peers.comes(step)

    def begin(self, step: int, micro: int) -> None:
        """Let a micro-batch enter the loop."""
        self._dense.begin(micro)
        rng_state.swap_in(self._seed, step, self._first + micro)

    def left(self, step: int, micro: int | None) -> None:
        """End the loop, on all trainers after the same step.

        `micro` is the micro-batch of a step that was in the loop; None: the step's last one, or none.
        """
        if self._peers is not None:
            leave(self._peers, step, micro)

    def reduce(self) -> None:
        """Put the dense gradients of the step in place, if its last micro-batch is in the loop."""
        self._dense.complete()

    def leave(self) -> None:
        """Let the micro-batch leave the loop. What comes next, such as reading the loader, draws the run's own numbers."""
        rng_state.swap_out()
        self._dense.leave()
