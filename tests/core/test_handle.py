"""The rows' learning rates, set as torch does."""

import math

import pytest
import torch

from skirl.core.groups import Groups, TorchHandle
from skirl.core.optim import FTRL, SGD, Adam
from skirl.core.tables import Table

TABLES = [Table("user", 9, 4), Table("item", 9, 4)]


def made(optimizer=None):
    return TorchHandle(Groups(TABLES, optimizer or SGD(lr=1.0)))


def test_each_group_has_its_settings():
    handle = made({"user": Adam(lr=0.5, weight_decay=0.1), "*": SGD(lr=2.0)})
    handle.param_groups[1]["lr"] = torch.tensor(0.25)
    handle.param_groups[0]["weight_decay"] = 0.2
    assert handle.settings() == [(0.5, 0.2), (0.25, 0.0)]
    with pytest.raises(ValueError, match="tables have several learning rates"):
        _ = handle.lr


def test_the_state_of_other_groups_is_refused():
    handle = made({"user": Adam(), "*": SGD()})
    with pytest.raises(ValueError, match=r"has the groups \['\*'\] of tables .*, but this collection has \['user', "):
        handle.load_state_dict(made().state_dict())


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "says"),
    [
        (SGD(), "lr", -1.0, "SGD: lr is -1.0, set it to a finite number"),
        (Adam(), "weight_decay", math.nan, "Adam: weight_decay is nan, set it to a finite number"),
        (FTRL(), "lr", 0.0, "FTRL: lr is 0, set it above 0; to keep rows as they are, freeze"),
        (Adam(), "betas", (0.5, 0.5), "betas of the group '\\*' was set: it is fixed when the collection is made"),
    ],
)
def test_what_cannot_be_set_is_refused(optimizer, name, value, says):
    handle = made(optimizer)
    handle.param_groups[0][name] = value
    with pytest.raises(ValueError, match=says):
        handle.settings()
