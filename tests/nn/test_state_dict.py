"""A collection's state dict names its rows, and is refused if these differ."""

from pathlib import Path

import pytest
import torch
from torch import nn

import skirl

IDS = skirl.KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))


def made() -> nn.ModuleDict:
    rows = skirl.EmbeddingBagCollection([skirl.Table("a", 10, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    return nn.ModuleDict({"rows": rows, "top": nn.Linear(2, 1)})


def step(model: nn.ModuleDict) -> None:
    model["top"](model["rows"](IDS)["a"]).sum().backward()


def test_rows_of_another_store_snapshot_or_step_are_refused(tmp_path: Path) -> None:
    model = made()
    step(model)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"another store's rows: its identity is .* skirl\.save and skirl\.load"):
        made().load_state_dict(state)
    step(model)
    with pytest.raises(RuntimeError, match="rows of another step: its steps is 1, here it is 2"):
        model.load_state_dict(state)
    state = model.state_dict()
    skirl.save(tmp_path, model=model)
    with pytest.raises(RuntimeError, match="rows of another moment: its generation is 0, here it is 1"):
        model.load_state_dict(state)
    del state["rows._extra_state"]
    model.load_state_dict(state, strict=False)


def test_a_state_dict_fits_the_checkpoint_saved_with_it(tmp_path: Path) -> None:
    model = made()
    step(model)
    skirl.save(tmp_path, model=model)
    other = made()
    skirl.load(tmp_path, model=other)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())
