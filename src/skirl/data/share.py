"""The samples of a stream that one trainer reads: some shards of every batch, or every n-th batch."""

from dataclasses import dataclass
from typing import ClassVar

from skirl.core.tree import block_of

Cut = tuple[int, int]
"""Samples low .. high - 1."""


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

    batches: ClassVar[int] = 1
    """Number of batches that all trainers together consume in one step."""

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

    def cuts(self, samples: int, batch: int) -> list[list[Cut]]:
        """Return the cuts to read from samples that begin with a step: for each step, its shards of the whole batch."""
        each = batch // self.of if self.cut else batch
        begins = range(self.first * each, self.last * each, each) if self.cut else (0,)
        return [[(low + at, low + at + each) for at in begins] for low in range(0, samples - batch + 1, batch)]

    def left_out(self, samples: int, batch: int) -> int:
        """Return the number of samples after the last whole batch."""
        return samples % batch


@dataclass(frozen=True)
class Turn:
    """Every `of`-th batch, from batch `rank` on. All trainers get the same number; the last one may be smaller, or empty.

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


Share = Shards | Turn
WHOLE = Turn(0, 1)
"""All samples, for a single trainer."""


def shards(first: int, last: int, of: int, batch: int) -> Share:
    """Return shards first .. last - 1 of `of`. With one shard that is `WHOLE`, which keeps a smaller last batch."""
    share = Shards(first, last, of)
    if batch % of:
        more = -(-batch // of) * of
        raise ValueError(f"a batch of {batch:,} samples is not {of} equal shards: set batch to {more:,}")
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
    of_rank = block_of(rank, ranks, shards)
    return of_rank.start, of_rank.stop
