"""What `torch.utils.data.DistributedSampler` is to a loader of one's own, for several trainers with the bits of one."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sized

import torch
import torch.distributed
from torch.utils.data import Sampler

from skirl.core.tree import check_shards
from skirl.data import share


class ShardSampler(Sampler[list[int]]):
    """A batch sampler: of every batch of `batch_size` samples, the shards of this trainer, a micro-batch each.

    Shard v of a batch is its samples v * batch_size / shards to before (v + 1) * batch_size / shards, and trainers have
    consecutive shards in the order of ranks. So a batch is the same, in the same micro-batches, for any number of trainers.
    A smaller last batch is left out; with one shard it is not.

    **Arguments**

    - `data`: what is sampled: a data set or another thing with a length, whose indices are 0 .. len - 1, or a sampler, which
      has to give the same indices on all trainers.
    - `batch_size`: samples of a whole batch, those of all trainers together.
    - `shards`: equal parts of a batch, a power of two, as many as trainers at least. They fix the bits, so keep them when
      the number of trainers changes. None takes the least such number.
    - `rank`, `ranks`: which trainer of how many; None for both takes those of torch.distributed or, before that has
      begun, those that `skirl launch` or torchrun has set; one trainer without either.
    - `shuffle`: whether indices come in another order in each epoch. A sampler has its own order, and takes False.
    - `seed`: decides that order, with the epoch; the same on all trainers.

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
        """Say which epoch comes next, as with a DistributedSampler: before each pass, the same on all trainers.

        **Arguments**

        - `epoch`: counted from 0.
        - `begin`: whole batches of it that are done; the next pass goes on behind them, with any number of trainers. Leave
          it 0 where a lookahead goes on: it skips them itself.
        """
        self.epoch, self._begin = epoch, begin
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        """Micro-batches of a pass."""
        if not isinstance(self._data, Sized):
            raise TypeError("the sampler in data has no length, so neither has this one")
        return sum(map(len, self._share.cuts(len(self._data), self.batch_size)[self._begin :]))

    def __iter__(self) -> Iterator[list[int]]:
        """One pass."""
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
    """Which trainer this process is, and of how many."""
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
