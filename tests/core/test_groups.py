"""Tables selected by patterns of their names, and the learning rates of their rows, set as torch does."""

import numpy as np
import pytest
import torch

from skirl.core.groups import Groups, Setting, TorchHandle
from skirl.core.optim import SGD, Adagrad, Adam, padded
from skirl.core.tables import Table
from skirl.engine.packs import Pack

TABLES = [Table(name, 9, 4) for name in ("user_id", "item", "user_city", "a[b]")]


def test_the_first_pattern_that_matches_counts():
    groups = Groups(TABLES, {"user_city": SGD(lr=1.0), "a[b]": SGD(lr=2.0), "user_*": SGD(lr=3.0), "*": SGD(lr=4.0)})
    assert [rule.lr for rule in groups] == [3.0, 4.0, 1.0, 2.0]
    assert [group.tables for group in groups.all] == [(2,), (3,), (0,), (1,)]
    assert Groups(TABLES, SGD()).all == (("*", SGD(), (0, 1, 2, 3)),)


def test_a_pattern_that_comes_too_late_is_refused():
    with pytest.raises(ValueError, match="optimizer has 'item', which is not the first match of any table"):
        Groups(TABLES, {"*": SGD(), "item": Adam()})


def test_scalars_are_those_of_each_tables_rule_and_settings():
    groups = Groups(TABLES, {"item": Adam(clip=2.0), "user_*": Adam(weight_decay=0.5), "*": Adagrad()})
    settings, steps = [Setting(0.1, 0.0), Setting(0.2, 0.25), Setting(0.3, 0.0)], np.array([1, 2, 3, 4])
    found = groups.scalars([0, 1, 2], settings, steps, np.float64)
    expected = [
        Adam().numbers(0.2, 0.25, 1), Adam(clip=2.0).numbers(0.1, 0.0, 2), Adam().numbers(0.2, 0.25, 3), (),
    ]  # fmt: skip
    np.testing.assert_array_equal(found, padded(expected, np.float64))
    kinds = [(optimizer.rule, optimizer.initial_state) for optimizer in groups]
    assert kinds[0] == kinds[1] != kinds[3]


def test_two_rules_of_one_name_do_not_share_rows():
    def adagrad(w, g, s, n):
        return w - n[0] * g * s, s

    class Other(Adagrad):
        update = staticmethod(adagrad)

    first, second = Pack(TABLES, {"item": Other(), "*": Adagrad()}, 0).kinds[:2]
    assert first != second


def made(optimizer=None):
    return TorchHandle(Groups([Table("user", 9, 4), Table("item", 9, 4)], optimizer or SGD(lr=1.0)))


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
