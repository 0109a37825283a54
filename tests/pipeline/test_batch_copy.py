"""Copies of batches, and their size in memory."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from skirl import Batch, KeyedJagged
from skirl.pipeline.batch_copy import own, own_state, weigh

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


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    name: str = "x"


def test_weight_of_everything_that_is_found():
    tensor = torch.zeros(10)
    batch = {"a": [tensor, tensor], "b": (np.zeros(3), None, 7, "text"), "c": Slotted(torch.zeros(2)), "d": b"12"}
    assert weigh(batch) == 40 + 24 + 8 + 2
    assert weigh(Batch(tensor, KeyedJagged(["a"], torch.arange(5), offsets=torch.arange(6)), tensor)) == 40 + 40 + 48


def test_weight_of_what_refers_to_itself():
    batch = [torch.zeros(1)]
    batch.append(batch)
    assert weigh(batch) == 4


def test_a_state_is_a_copy_down_to_its_tensors():
    state = {"place": [1, {"file": "a"}], "generator": torch.arange(3), "pair": (1, [2])}
    mine = own_state(state)
    state["place"][1]["file"], state["pair"][1][0] = "b", 3
    state["generator"].zero_()
    assert mine["place"] == [1, {"file": "a"}] and mine["pair"] == (1, [2])
    assert mine["generator"].tolist() == [0, 1, 2]


def test_what_is_in_two_places_of_a_state_stays_so():
    part, tensor = [1], torch.ones(2)
    state: dict = {"a": part, "b": part, "c": [tensor], "d": [tensor]}
    state["all"] = state
    mine = own_state(state)
    assert mine["a"] is mine["b"] and mine["a"] is not part
    assert mine["c"][0] is mine["d"][0] and mine["c"][0] is not tensor
    assert mine["all"] is mine
