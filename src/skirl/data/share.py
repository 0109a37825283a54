"""Which samples of a stream one trainer reads: all, some shards of every batch, or every so-manieth batch."""

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
        """Batches that all trainers together take for one step of theirs."""
        ...

    @property
    def partial(self) -> bool:
        """Whether there are samples that another trainer reads."""
        ...

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """What is read of so many samples in order, which begin with a step: of each step, its batches.

        **Arguments**

        - `samples`: how many there are.
        - `batch`: samples of a batch.
        """
        ...

    def left_out(self, samples: int, batch: int) -> int:
        """The samples at the end that no trainer reads; arguments as in `cuts`."""
        ...


@dataclass(frozen=True)
class Whole:
    """All samples: there is one trainer.

    >>> Whole().cuts(10, 4)
    [[(0, 4)], [(4, 8)], [(8, 10)]]
    """

    batches = 1
    partial = False

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Batch after batch; the last may be smaller."""
        return [[(low, min(low + batch, samples))] for low in range(0, samples, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        """None."""
        return 0


@dataclass(frozen=True)
class Shards:
    """Shards `first` .. `last` - 1 of `of` equal ones of every batch, a micro-batch each; a smaller last batch is left out.

    >>> Shards(1, 3, 4).cuts(19, 8)
    [[(2, 4), (4, 6)], [(10, 12), (12, 14)]]
    >>> Shards(1, 3, 4).left_out(19, 8)
    3
    """

    first: int
    last: int
    of: int
    cut: bool = True
    """False: they are not cut out, and whole batches are read."""

    batches = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.of:
            raise ValueError(
                f"shards {self.first} to {self.last} of {self.of} are none: set first to 0 or more, last above it and to at "
                "most all of them"
            )

    @property
    def partial(self) -> bool:
        """Whether another trainer reads some."""
        return self.cut and self.last - self.first < self.of

    def check(self, batch: int) -> None:
        """Refuse a batch that is not so many equal shards."""
        if batch % self.of:
            more = -(-batch // self.of) * self.of
            raise ValueError(f"a batch of {batch:,} samples is not {self.of} equal shards: set batch to {more:,}")

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """The shards of each whole batch."""
        each = batch // self.of if self.cut else batch
        mine = range(self.first * each, self.last * each, each) if self.cut else (0,)
        return [[(low + at, low + at + each) for at in mine] for low in range(0, samples - batch + 1, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        """Those of a batch that is not whole."""
        return samples % batch


@dataclass(frozen=True)
class Turn:
    """Every `of`-th batch from `rank` on. All trainers get equally many; in the last round some may get an empty one.

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
        """One for each trainer."""
        return self.of

    @property
    def partial(self) -> bool:
        """Whether another trainer reads some."""
        return self.of > 1

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """The batch whose turn it is in each round."""
        rounds = range(self.rank * batch, samples + self.rank * batch, self.of * batch)
        return [[(min(low, samples), min(low + batch, samples))] for low in rounds]

    def left_out(self, samples: int, batch: int) -> int:
        """None."""
        return 0


WHOLE = Whole()


def shards(first: int, last: int, of: int, batch: int) -> Share:
    """Shards first .. last - 1; all of it where there is one shard, and then a smaller last batch is not left out."""
    share = Shards(first, last, of)
    share.check(batch)
    return WHOLE if of == 1 else share


def block(rank: int, ranks: int, shards: int) -> tuple[int, int]:
    """The shards of a trainer: its first, and the one after its last. As equal as can be, in the order of ranks.

    **Arguments**

    - `rank`: which trainer.
    - `ranks`: how many there are.
    - `shards`: of a step, as many as trainers at least.

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
    """Samples low .. high - 1 of a batch, in memory of their own.

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
