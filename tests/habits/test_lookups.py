"""Several lookups in one step: towers, in-batch negatives, parts of a batch. Compared with plain PyTorch."""

import pytest
import torch
from torch import Tensor

import skirl
from skirl import KeyedJagged, Table
from tests.habits.plain import Plain, Tower, assert_equal, batches, first_rows, train

Model = Tower | Plain


def two_towers(model: Model, ids: KeyedJagged) -> Tensor:
    """One lookup for each tower, with in-batch negatives: each user against each item."""
    user = model.look_up(ids.select(["user"]))["user"]
    items = model.look_up(ids.select(["bought", "clicked"]))
    scores = user @ (items["clicked"] + items["bought"]).t()
    return torch.nn.functional.cross_entropy(scores * 50, torch.arange(len(user))) + model.top(user).square().sum()


def twice(model: Model, ids: KeyedJagged) -> Tensor:
    """Look up the whole batch, twice."""
    return model(ids) + 3 * model(ids)


def overlapping(model: Model, ids: KeyedJagged) -> Tensor:
    """Look up two parts that share a feature, and the whole."""
    one = model.look_up(ids.select(["user", "clicked"]))
    other = model.look_up(ids.select(["clicked", "bought"]))
    return model(ids) + (one["user"] * one["clicked"]).sum() - (other["clicked"] * other["bought"]).sum()


def one_without_grad(model: Model, ids: KeyedJagged) -> Tensor:
    """Look up a second time in torch.no_grad(), for a target, say."""
    with torch.no_grad():
        target = model.look_up(ids.select(["user"]))["user"].sum()
    return model(ids) * target


@pytest.mark.parametrize("forward", [two_towers, twice, overlapping, one_without_grad])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_summed_and_rows_updated_once(forward, accumulate):
    data = batches(6)
    ours, plain = (train(model, data, forward=forward, accumulate=accumulate) for model in (Tower(), Plain()))
    assert_equal(ours, plain)
    assert not torch.equal(plain["item"], first_rows("item"))


def test_two_lookups_have_the_bits_of_one_used_twice():
    def one(model: Model, ids: KeyedJagged) -> Tensor:
        out = model.look_up(ids)
        return sum((out[name].square().sum() for name in (*out, *out)), torch.zeros((), dtype=torch.float64))

    def two(model: Model, ids: KeyedJagged) -> Tensor:
        outs = model.look_up(ids), model.look_up(ids.select(["user", "clicked", "bought"]))
        return sum((out[name].square().sum() for out in outs for name in out), torch.zeros((), dtype=torch.float64))

    data = batches(5)
    ours, theirs = train(Tower(), data, forward=one), train(Tower(), data, forward=two)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["user"], first_rows("user"))


def test_a_part_has_only_its_features_and_ids():
    tower = Tower()
    with skirl.lookahead(batches(1), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            out = tower.rows(ids.select(["bought", "user"]))
            assert list(out) == ["user", "bought"] and len(out) == 2 and out.stacked().shape == (8, 2, 3)
            with pytest.raises(KeyError, match="no feature 'clicked': take one of 'user', 'bought'"):
                out["clicked"]
            part = ids.select(["clicked"])
            with pytest.raises(ValueError, match="got other ids of feature 'clicked'"):
                tower.rows(KeyedJagged(["clicked"], part.values() + 1, lengths=part.lengths()))


def test_other_weights_in_the_second_lookup():
    rows = skirl.EmbeddingBagCollection([Table("a", 10, 2)], optimizer=skirl.SGD(lr=1.0), cache=10)
    ids = KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))
    with skirl.lookahead([ids], rows, sparse=lambda ids: ids) as ahead:
        for got in ahead:
            rows(got)
            with pytest.raises(ValueError, match="the second lookup of a batch has new weights"):
                rows(KeyedJagged(["a"], got.values(), offsets=got.offsets(), weights=torch.ones(2) / 2))


def test_a_whole_batch_in_the_place_of_its_ids_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match=r"ids are a Batch, which has no keys\(\): pass its \.sparse"):
        Tower().rows.eval()(skirl.Batch(torch.empty(8, 0), batches(1)[0], torch.zeros(8)))
