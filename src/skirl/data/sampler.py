"""A batch sampler in the place of `torch.utils.data.DistributedSampler`: several trainers compute the bits of one."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sized

import torch
import torch.distributed
from torch.utils.data import Sampler

from skirl.core.tree import check_shards
from skirl.data import share


class ShardSampler(Sampler[list[int]]):
    """A batch sampler that yields this trainer's shards of every batch of `batch_size` samples, one micro-batch each.

    With n = batch_size / shards, shard v of a batch holds its samples v * n .. (v + 1) * n - 1. Trainers have consecutive
    shards in the order of ranks. So a batch is the same, in the same micro-batches, for any number of trainers. A smaller
    last batch is left out, unless there is only one shard.

    **Arguments**

    - `data`: what to sample: a data set or anything else with a length, whose indices are 0 .. len - 1, or a sampler, which
      must yield the same indices on all trainers.
    - `batch_size`: samples of a whole batch, over all trainers.
    - `shards`: number of equal parts of a batch: a power of two, at least the number of trainers. It fixes the bits, so keep
      it when the number of trainers changes. None takes the smallest such number.
    - `rank`, `ranks`: this trainer's rank and the number of trainers. If both are None, they come from torch.distributed if
      it is initialized, else from the environment that `skirl launch` or torchrun sets; without either, one trainer.
    - `shuffle`: whether to draw a new order of the indices in each epoch; False for a sampler, which has its own order.
    - `seed`: seeds that order, together with the epoch; the same on all trainers, 0 so that runs repeat.

    >>> for rank in range(2):
    ...     print(list(ShardSampler(range(11), batch_size=4, shards=4, rank=rank, ranks=2)))
    [[0], [1], [4], [5]]
    [[2], [3], [6], [7]]
    """

    def __init__(
        self,
        data: Sized | Sampler[int],
        batch_size: int,
        *,
        shards: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if (rank is None) != (ranks is None):
            raise ValueError(f"rank is {rank} and ranks is {ranks}: set both or none")
        if rank is None or ranks is None:
            rank, ranks = _trainers()
        if isinstance(data, Sampler) and shuffle:
            raise ValueError("shuffle is True, and data is a sampler, which has an order of its own: leave shuffle out")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: set it to 1 or more")
        shards = 1 << (ranks - 1).bit_length() if shards is None else shards
        check_shards(shards)
        self.batch_size, self.shards, self.seed, self.epoch = batch_size, shards, seed, 0
        self._data, self._shuffle, self._begin = data, shuffle, 0
        self._share = share.shards(*share.block(rank, ranks, shards), shards, batch_size)

    def set_epoch(self, epoch: int, begin: int = 0) -> None:
        """Set the next epoch, as with a DistributedSampler: call it before each pass, with the same value on all trainers.

        **Arguments**

        - `epoch`: number of the epoch, from 0.
        - `begin`: number of whole batches already done; the next pass continues after them, with any number of trainers.
          Leave it 0 if a lookahead resumes: it skips them itself.
        """
        self.epoch, self._begin = epoch, begin
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        """Return the number of micro-batches in the next pass."""
        if not isinstance(self._data, Sized):
            raise TypeError("the sampler in data has no length, so neither has this one")
        return sum(map(len, self._share.cuts(len(self._data), self.batch_size)[self._begin :]))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each micro-batch of one pass."""
        begin, self._begin = self._begin, 0
        indices = itertools.islice(self._indices(), begin * self.batch_size, None)
        while batch := list(itertools.islice(indices, self.batch_size)):
            for cuts in self._share.cuts(len(batch), self.batch_size):
                yield from (batch[low:high] for low, high in cuts)

    def _indices(self) -> Iterable[int]:
        if isinstance(self._data, Sampler):
            return self._data
        if not self._shuffle:
            return range(len(self._data))
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(len(self._data), generator=draw).tolist()


def _trainers() -> tuple[int, int]:
    """Return the rank of this process and the number of trainers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks == "1":
        return 0, 1
    try:
        return int(os.environ["RANK"]), int(ranks)
    except (KeyError, ValueError):
        raise ValueError(
            f"WORLD_SIZE is {ranks!r} and RANK is {os.environ.get('RANK')!r} in the environment: start trainers with "
            "`skirl launch` or torchrun, which set both, or pass rank and ranks"
        ) from None
