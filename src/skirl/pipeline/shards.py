"""The shards of a step in the loop: their dense gradients, and random numbers that do not depend on who computes them."""

from torch import nn

from skirl.nn.dense_sums import DenseSums, check_sharded
from skirl.peers.base import Peers
from skirl.pipeline.agree import check_weights, leave
from skirl.tools import rng_state


class ShardsInLoop:
    """What happens as micro-batches of steps with shards come into the loop and leave it.

    **Arguments**

    - `model`: as given to `lookahead`.
    - `shards`, `accumulate`: the same.
    - `seed`: of the embeddings; random numbers are drawn by it, the step and the micro-batch.
    - `mine`: the shards of this trainer.
    - `peers`: all trainers, where there are several.
    """

    def __init__(
        self, model: nn.Module, shards: int, accumulate: int, seed: int, mine: range, peers: Peers | None = None
    ) -> None:
        self._model, self._peers = model, peers
        self._seed = seed
        self._first = mine.start * accumulate
        self._dense = DenseSums(model, shards, accumulate, mine, peers)

    def check(self) -> None:
        """Refuse a model whose results depend on who computes which shard, or which differs between trainers."""
        check_sharded(self._model)
        if self._peers is not None:
            check_weights(self._model, self._peers)

    def open(self) -> None:
        """A pass begins."""
        self._dense.open()

    def close(self) -> None:
        """It is over."""
        rng_state.swap_out()
        self._dense.close()

    def comes(self, step: int) -> None:
        """What is said to other trainers from here on is for a step."""
        if self._peers is not None:
            self._peers.comes(step)

    def begin(self, step: int, micro: int) -> None:
        """A micro-batch comes into the loop."""
        self._dense.begin(micro)
        rng_state.swap_in(self._seed, step, self._first + micro)

    def left(self, step: int, micro: int | None) -> None:
        """The loop is over, of all trainers after the same step.

        micro: which micro-batch of a step was in the loop; None: the step's last one, or none.
        """
        if self._peers is not None:
            leave(self._peers, step, micro)

    def reduce(self) -> None:
        """Put the dense gradients of the step in place, if its last micro-batch is in the loop."""
        self._dense.complete()

    def leave(self) -> None:
        """It leaves the loop; what comes next, a loader's reading, is the run's own."""
        rng_state.swap_out()
        self._dense.leave()
