"""The batch sampler of several trainers: together they get the batches of one, each shard a micro-batch."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Sampler

import skirl
from tests.cases import cases


class Backwards(Sampler[int]):
    """A user-defined sampler without a length."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % self.samples for i in reversed(range(self.samples))])


@given(
    st.integers(0, 60), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.data(), st.booleans(), st.integers(0, 3),
    st.integers(0, 2),
)  # fmt: skip
@cases(100)
def test_the_shards_of_all_trainers_are_the_batches_of_one(
    samples: int, shards: int, each: int, data: st.DataObject, shuffle: bool, epoch: int, begin: int
) -> None:
    batch, ranks = shards * each, data.draw(st.integers(1, shards))
    order = list(range(samples))
    if shuffle:
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(7 + epoch)).tolist()
    whole = [order[k : k + batch] for k in range(begin * batch, samples, batch)]
    whole = [one for one in whole if len(one) == batch or shards == 1]
    expected = [[one[v * each : (v + 1) * each] for v in range(shards)] for one in whole]
    found = []
    for rank in range(ranks):
        mine = skirl.ShardSampler(range(samples), batch, shards=shards, rank=rank, ranks=ranks, shuffle=shuffle, seed=7)
        mine.set_epoch(epoch, begin)
        own = (rank + 1) * shards // ranks - rank * shards // ranks
        assert len(mine) == own * len(whole)
        parts = list(mine)
        found.append([parts[k : k + own] for k in range(0, len(parts), own)])
    assert [list(itertools.chain.from_iterable(steps)) for steps in zip(*found, strict=True)] == expected


def test_a_sampler_gives_its_indices() -> None:
    theirs = Backwards(9)
    mine = skirl.ShardSampler(theirs, 4, shards=2, rank=1, ranks=2)
    assert list(mine) == [[6, 5], [2, 1]]
    mine.set_epoch(1)
    assert list(mine) == [[7, 6], [3, 2]]
    with pytest.raises(TypeError, match="the sampler in data has no length"):
        len(mine)


def test_it_asks_torch_which_trainer_it_is(tmp_path: Path) -> None:
    assert len(skirl.ShardSampler(range(8), 4)) == 2, "alone: two whole batches"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert list(skirl.ShardSampler(range(8), 4, shards=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        dist.destroy_process_group()
