"""The halves of an update, as several trainers use them: send values, sum blocks of shards, add others' sums, apply."""

import numpy as np
import pytest
import torch

import skirl
from skirl import SGD, KeyedJagged, Table
from skirl.core.optim import padded
from skirl.engine.device.base import Sums
from skirl.engine.kernels.tree import Parts

DEVICES = pytest.mark.parametrize("device", ["cpu", "interpret"])


def batches(count, size=10):
    rng = np.random.default_rng(1)
    return [KeyedJagged.one_hot(["a"], torch.from_numpy(rng.integers(0, 8, (size, 1)))) for _ in range(count)]


def rows(device):
    return skirl.EmbeddingBagCollection([Table("a", 50, 4)], optimizer=SGD(lr=1.0), cache=30, device=device)


@DEVICES
def test_sums_of_others_are_combined_and_applied(device):
    """The sums of three trainers: of shards 0 and 1, of shard 2, of shard 3. Each position is a request of one of them."""
    embeddings, rng = rows(device), np.random.default_rng(0)
    (ids,) = batches(1, size=20)
    with skirl.lookahead([ids], embeddings, sparse=lambda ids: ids) as ahead:
        for _ in ahead:
            out = embeddings(ids)["a"].detach()
            work, bank = embeddings.current.work, embeddings.engine.banks[0]
            assert torch.equal(bank.values(work), out)
            parts = Parts(np.array([6, 13, 20]), np.array([0, 2, 3]))
            given = rng.standard_normal((20, 4)).astype(np.float32)
            counted = rng.random(20) < 0.7
            sums = bank.combined(work, parts, Sums(torch.from_numpy(given), torch.from_numpy(counted)))
            scalars = padded([(np.inf, 0, 1)], np.float32)
            bank.apply(work, sums, scalars, 0, 0.25)
            after = embeddings.rows("a", ids.values())
    for row in range(8):
        of_row = [(i, pos) for i, ends in enumerate([(0, 6), (6, 13), (13, 20)]) for pos in range(*ends)]
        mine = [(i, pos) for i, pos in of_row if ids.values()[pos] == row and counted[pos]]
        total = [np.zeros(4, np.float32) for _ in range(3)]
        for i, pos in mine:
            total[i] = total[i] + given[pos]
        expected = total[0] + (total[1] + total[2])
        for pos in range(20):
            if ids.values()[pos] == row:
                assert torch.equal(after[pos], out[pos] - torch.from_numpy(np.float32(0.25) * expected))


@DEVICES
def test_sums_of_blocks_make_the_sum(device):
    """Blocks whose number of shards is no power of two send sums of whole subtrees, which combine to the sum of all."""
    embeddings, rng = rows(device), np.random.default_rng(0)
    with skirl.lookahead(batches(8), embeddings, sparse=lambda ids: ids, shards=8) as ahead:
        for ids in ahead:
            embeddings(ids)
            if ahead.ends_step:
                work, bank = embeddings.current.work, embeddings.engine.banks[0]
                grads = torch.from_numpy(rng.standard_normal((80, 4)).astype(np.float32))
                work.joint[0], work.live = grads, {(0, micro): np.ones(1, np.bool_) for micro in range(8)}
                whole = bank.sums(work)
                half, one, two, last = (
                    bank.sums(work, block) for block in (range(4), range(4, 5), range(5, 6), range(6, 8))
                )
    assert bool(whole.counted.all()) and not bool(one.counted.all())
    assert torch.equal(whole.values, half.values + ((one.values + two.values) + last.values))
    assert not torch.equal(whole.values, ((half.values + one.values) + two.values) + last.values)
