"""Copies of batches, and their size in memory."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from skirl import Batch, KeyedJagged
from skirl.pipeline.reader import own

Pair = namedtuple("Pair", "x y")


def test_a_slice_of_a_large_tensor_is_copied_alone():
    data = torch.arange(1_000_000)
    mine = own([data[5:9], data.view(1000, 1000)[:, 3]])
    assert [part.untyped_storage().nbytes() for part in mine] == [32, 8000]
    assert mine[0].tolist() == [5, 6, 7, 8]
    assert torch.equal(mine[1], data.view(1000, 1000)[:, 3])


def test_nothing_is_shared_with_the_loader():
    batch = Batch(
        torch.ones(2, 3), KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])), torch.ones(2)
    )
    parts = Pair({"batch": batch}, np.ones(3))
    mine = own(parts)
    batch.dense.zero_()
    batch.sparse.values().zero_()
    parts.y[:] = 0
    assert type(mine) is Pair
    assert mine.x["batch"].dense.sum() == 6
    assert mine.x["batch"].sparse.values().tolist() == [1, 2]
    assert mine.y.sum() == 3


def test_one_tensor_in_two_places_stays_one():
    tensor = torch.ones(3)
    first, second = own([tensor, tensor])
    assert first is second


def test_gradients_wanted_stay_wanted():
    leaf = torch.ones(3, requires_grad=True)
    assert own(leaf).requires_grad and own(leaf).is_leaf
    assert own(leaf * 2).requires_grad  # plain deepcopy refuses


def test_torchrecs_own(recwarn):
    torchrec = pytest.importorskip("torchrec", reason="not installed: constraints/others.txt")
    values = torch.arange(1000)
    sparse = torchrec.KeyedJaggedTensor(keys=["a"], values=values[:3], lengths=torch.tensor([2, 1]))
    mine = own(sparse)
    values.zero_()
    assert mine.values().tolist() == [0, 1, 2]
    assert mine.values().untyped_storage().nbytes() == 24
    assert mine.offsets().tolist() == [0, 2, 3]
