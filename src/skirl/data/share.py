"""The samples of a stream that one trainer reads: some shards of every batch, or every n-th batch."""

import itertools
import os
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed
from torch.utils.data import Sampler

from skirl.core.tree import block_of, check_shards

Cut = tuple[int, int]  # samples low .. high - 1


@dataclass(frozen=True)
class Shards:
    """Shards `first` .. `last` - 1 of each batch's `of` equal shards, a micro-batch each. A smaller last one is dropped."""

    first: int
    last: int
    of: int
    cut: bool = True
    """If False, the shards are not cut out: whole batches are read."""

    batches: ClassVar[int] = 1
    """That all trainers together consume in one step."""

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """The cuts to read from samples that begin with a step, for each step."""
        each = batch // self.of if self.cut else batch
        begins = range(self.first * each, self.last * each, each) if self.cut else (0,)
        return [[(low + at, low + at + each) for at in begins] for low in range(0, samples - batch + 1, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        return samples % batch


@dataclass(frozen=True)
class Turn:
    """Every `of`-th batch, from batch `rank` on. All trainers get the same number; the last one may be smaller, or empty.

    >>> [Turn(rank, 3).cuts(10, 4) for rank in range(3)], Turn(2, 3).cuts(7, 4)
    ([[[(0, 4)]], [[(4, 8)]], [[(8, 10)]]], [[(7, 7)]])
    """

    rank: int
    of: int

    @property
    def batches(self) -> int:
        return self.of

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        rounds = range(self.rank * batch, samples + self.rank * batch, self.of * batch)
        return [[(min(low, samples), min(low + batch, samples))] for low in rounds]

    def left_out(self, samples: int, batch: int) -> int:
        return 0


Share = Shards | Turn
WHOLE = Turn(0, 1)


def of_batch(first: int, last: int, of: int, batch: int) -> Share:
    """Shards first .. last - 1 of `of`. With one shard that is `WHOLE`, which keeps a smaller last batch."""
    share = Shards(first, last, of)
    if batch % of:
        more = -(-batch // of) * of
        raise ValueError(f"a batch of {batch:,} samples is not {of} equal shards: set batch to {more:,}")
    return WHOLE if of == 1 else share


def block(rank: int, ranks: int, shards: int) -> tuple[int, int]:
    """A trainer's shards as (first, last + 1). Trainers get nearly equal numbers of them, in the order of ranks."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}: set it from 0 to {ranks - 1}")
    if shards < ranks:
        raise ValueError(f"a step has {shards} shards for {ranks} trainers: set shards to {ranks} or more")
    of_rank = block_of(rank, ranks, shards)
    return of_rank.start, of_rank.stop


class ShardSampler(Sampler[list[int]]):
    """A batch sampler that yields this trainer's shards of every batch of `batch_size` samples, one micro-batch each.

    With n = batch_size / shards, shard v of a batch holds its samples v * n .. (v + 1) * n - 1. Trainers have consecutive
    shards in the order of ranks. So a batch is the same, in the same micro-batches, for any number of trainers. A smaller
    last batch is left out, unless there is only one shard.

    **Arguments**

    - `data`: a data set or anything else with a length, or a sampler, which must yield the same indices on all trainers.
    - `batch_size`: samples of a whole batch, over all trainers.
    - `shards`: number of equal parts of a batch: a power of two, at least the number of trainers. It fixes the bits, so keep
      it when the number of trainers changes. None takes the smallest such number.
    - `rank`, `ranks`: if both are None, they come from torch.distributed if it is initialized, else from the environment
      that `skirl launch` or torchrun sets; without either, one trainer.
    - `shuffle`: whether to draw a new order of the indices in each epoch; False for a sampler, which has its own order.
    - `seed`: seeds that order, together with the epoch.

    >>> for rank in range(2):
    ...     print(list(ShardSampler(range(11), batch_size=4, shards=4, rank=rank, ranks=2)))
    [[0], [1], [4], [5]]
    [[2], [3], [6], [7]]
    """

    def __init__(
        self, data: Sized | Sampler[int], batch_size: int, *, shards: int | None = None, rank: int | None = None,
        ranks: int | None = None, shuffle: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
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
        self._share = of_batch(*block(rank, ranks, shards), shards, batch_size)

    def set_epoch(self, epoch: int, begin: int = 0) -> None:
        """Set the next epoch, as with a DistributedSampler: call it before each pass, with the same value on all trainers.

        **Arguments**

        - `begin`: number of whole batches already done; the next pass continues after them, with any number of trainers.
          Leave it 0 if a lookahead resumes: it skips them itself.
        """
        self.epoch, self._begin = epoch, begin
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        if not isinstance(self._data, Sized):
            raise TypeError("the sampler in data has no length, so neither has this one")
        return sum(map(len, self._share.cuts(len(self._data), self.batch_size)[self._begin :]))

    def __iter__(self) -> Iterator[list[int]]:
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
