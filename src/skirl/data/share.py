"""The samples of a stream that one trainer reads: all, some shards of every batch, or every n-th batch."""

from dataclasses import dataclass
from typing import Protocol

import torch

from skirl.core.batch import Batch, KeyedJagged
from skirl.core.inverse import is_shared
from skirl.core.tree import block_of

Cut = tuple[int, int]
"""Samples low .. high - 1."""


class Share(Protocol):
    """The samples that one trainer reads."""

    @property
    def batches(self) -> int:
        """Number of batches that all trainers together consume in one step."""
        ...

    @property
    def partial(self) -> bool:
        """True if another trainer reads some of the samples."""
        ...

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Return the cuts to read from consecutive samples that begin with a step: for each step, a list of batches."""
        ...

    def left_out(self, samples: int, batch: int) -> int:
        """Return the number of samples at the end that no trainer reads. The arguments are those of `cuts`."""
        ...


@dataclass(frozen=True)
class AllSamples:
    """All samples, for a single trainer.

    >>> AllSamples().cuts(10, 4)
    [[(0, 4)], [(4, 8)], [(8, 10)]]
    """

    batches = 1
    partial = False

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Return one batch per step; the last may be smaller."""
        return [[(low, min(low + batch, samples))] for low in range(0, samples, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        """Return 0: every sample is read."""
        return 0


@dataclass(frozen=True)
class Shards:
    """Shards `first` .. `last` - 1 of each batch's `of` equal shards, a micro-batch each; a smaller last batch is left out.

    >>> Shards(1, 3, 4).cuts(19, 8)
    [[(2, 4), (4, 6)], [(10, 12), (12, 14)]]
    >>> Shards(1, 3, 4).left_out(19, 8)
    3
    """

    first: int
    last: int
    of: int
    cut: bool = True
    """If False, the shards are not cut out: whole batches are read."""

    batches = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.of:
            raise ValueError(
                f"shards {self.first} to {self.last} of {self.of} are not a range: set first to 0 or more, and last "
                f"above it and to at most {self.of}"
            )

    @property
    def partial(self) -> bool:
        """True if another trainer reads some of the samples."""
        return self.cut and self.last - self.first < self.of

    def check(self, batch: int) -> None:
        """Raise unless a batch divides into `of` equal shards."""
        if batch % self.of:
            more = -(-batch // self.of) * self.of
            raise ValueError(f"a batch of {batch:,} samples is not {self.of} equal shards: set batch to {more:,}")

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Return the shards of each whole batch."""
        each = batch // self.of if self.cut else batch
        mine = range(self.first * each, self.last * each, each) if self.cut else (0,)
        return [[(low + at, low + at + each) for at in mine] for low in range(0, samples - batch + 1, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        """Return the number of samples after the last whole batch."""
        return samples % batch


@dataclass(frozen=True)
class Turn:
    """Every `of`-th batch, from batch `rank` on. All trainers get the same number; the last one may be empty.

    >>> [Turn(rank, 3).cuts(10, 4) for rank in range(3)], Turn(2, 3).cuts(7, 4)
    ([[[(0, 4)]], [[(4, 8)]], [[(8, 10)]]], [[(7, 7)]])
    """

    rank: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ValueError(f"rank is {self.rank} of {self.of}: set it from 0 to {self.of - 1}")

    @property
    def batches(self) -> int:
        """Number of batches per step: one for each trainer."""
        return self.of

    @property
    def partial(self) -> bool:
        """True if another trainer reads some of the samples."""
        return self.of > 1

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Return this trainer's batch in each round."""
        rounds = range(self.rank * batch, samples + self.rank * batch, self.of * batch)
        return [[(min(low, samples), min(low + batch, samples))] for low in rounds]

    def left_out(self, samples: int, batch: int) -> int:
        """Return 0: every sample is read."""
        return 0


WHOLE = AllSamples()


def shards(first: int, last: int, of: int, batch: int) -> Share:
    """Return shards first .. last - 1 of `of`. With one shard that is `WHOLE`, which keeps a smaller last batch."""
    share = Shards(first, last, of)
    share.check(batch)
    return WHOLE if of == 1 else share


def block(rank: int, ranks: int, shards: int) -> tuple[int, int]:
    """Return a trainer's shards as (first, last + 1). Trainers get nearly equal numbers of them, in the order of ranks.

    >>> [block(rank, 3, 8) for rank in range(3)]
    [(0, 2), (2, 5), (5, 8)]
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank} of {ranks}: set it from 0 to {ranks - 1}")
    if shards < ranks:
        raise ValueError(f"a step has {shards} shards for {ranks} trainers: set shards to {ranks} or more")
    mine = block_of(rank, ranks, shards)
    return mine.start, mine.stop


def part_of(batch: Batch, low: int, high: int) -> Batch:
    """Copy samples low .. high - 1 of a batch into a new one.

    >>> whole = Batch(torch.zeros(3, 1), KeyedJagged.one_hot(["a"], torch.tensor([[7], [8], [9]])), torch.tensor([0, 1, 0]))
    >>> part = part_of(whole, 1, 3)
    >>> part.sparse.values().tolist(), part.labels.tolist()
    ([8, 9], [1, 0])
    """
    sparse, samples = batch.sparse, len(batch.labels)
    if is_shared(sparse):
        jagged = KeyedJagged.of(sparse).samples(low, high)
        return Batch(batch.dense[low:high].clone(), jagged, batch.labels[low:high].clone())
    offsets, keys = sparse.offsets(), list(sparse.keys())
    starts = torch.arange(len(keys)) * samples
    begins, ends = offsets[starts + low].tolist(), offsets[starts + high].tolist()
    values, weights = (
        None if of_ids is None else torch.cat([of_ids[begin:end] for begin, end in zip(begins, ends)])
        for of_ids in (sparse.values(), sparse.weights_or_none())
    )
    assert values is not None
    lengths = offsets.diff().view(len(keys), samples)[:, low:high].reshape(-1)
    jagged = KeyedJagged(keys, values, lengths=lengths, weights=weights)
    return Batch(batch.dense[low:high].clone(), jagged, batch.labels[low:high].clone())
