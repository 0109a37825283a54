"""The batches of a source as the shards of steps: the samples of a step are the same for every number of shards."""

import logging
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.data.source import Source

log = logging.getLogger("skirl")


class Sharded:
    """A loader for a lookahead over a source: each of its batches in equal parts, one after the other.

    A batch that cannot be divided, the last of an epoch, is left out.

    **Arguments**

    - `source`: its batches are steps.
    - `shards`: parts of each.
    """

    yields_fresh: ClassVar[bool] = True

    def __init__(self, source: Source, shards: int) -> None:
        self.source = source
        self.shards = shards
        self.steps: int | None = None
        """Steps of the pass since it began in this process; None until the last one is yielded."""
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.steps, yielded = None, 0
        batches = self._divisible()
        ahead = next(batches, None)
        while ahead is not None:  # one batch is held back, to know of the last one that it is
            (batch, self._state), ahead = ahead, next(batches, None)
            yielded += 1
            if ahead is None:
                self.steps = yielded
            yield from divided(batch, self.shards)
        self._state = None

    def _divisible(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        for batch in self.source:
            if len(batch.labels) % self.shards == 0:
                yield batch, self.source.state_dict()
            else:
                log.warning(
                    "%d samples at the end of an epoch are left out: they are no multiple of %d shards",
                    len(batch.labels), self.shards,
                )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Where the source is after the batch that was yielded last."""
        return self.source.state_dict() if self._state is None else self._state

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse what is no state of the source."""
        self.source.check_state(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass go on where a state was taken."""
        self._state = None
        self.source.load_state_dict(state)


def divided(batch: Batch, shards: int) -> list[Batch]:
    """A batch in parts of equal size, its samples in order.

    **Arguments**

    - `batch`: whose size is a multiple of `shards`.
    - `shards`: how many parts.

    >>> sparse = KeyedJagged(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1]))
    >>> parts = divided(Batch(torch.zeros(2, 1), sparse, torch.zeros(2)), 2)
    >>> [(part.sparse.values().tolist(), part.sparse.lengths().tolist()) for part in parts]
    [([1, 2, 3], [2, 1]), ([4], [0, 1])]
    """
    size, sparse = len(batch.labels) // shards, batch.sparse
    keys, offsets, of_ids = list(sparse.keys()), sparse.offsets(), (sparse.values(), sparse.weights_or_none())
    starts = offsets[torch.arange(len(keys) * shards + 1) * size].tolist()
    lengths = offsets.diff().view(len(keys), shards, size)
    made = []
    for shard in range(shards):
        of_features = [slice(starts[i], starts[i + 1]) for i in range(shard, len(keys) * shards, shards)]
        values, weights = (None if t is None else torch.cat([t[part] for part in of_features]) for t in of_ids)
        assert values is not None
        ids = KeyedJagged(keys, values, lengths=lengths[:, shard].reshape(-1), weights=weights)
        samples = slice(shard * size, (shard + 1) * size)
        made.append(Batch(batch.dense[samples].clone(), ids, batch.labels[samples].clone()))
    return made
