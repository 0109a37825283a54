"""Several lookups in one step: towers, in-batch negatives, parts of a batch. Compared with plain PyTorch."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu_

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


def test_a_part_has_only_its_features():
    tower = Tower()
    with skirl.lookahead(batches(1), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            out = tower.rows(ids.select(["bought", "user"]))
            assert list(out) == ["user", "bought"] and len(out) == 2 and out.stacked().shape == (8, 2, 3)
            with pytest.raises(KeyError, match="no feature 'clicked': take one of 'user', 'bought'"):
                out["clicked"]


def test_a_part_of_other_ids():
    tower = Tower()
    with skirl.lookahead(batches(1), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            part = ids.select(["clicked"])
            with pytest.raises(ValueError, match="got other ids of feature 'clicked'"):
                tower.rows(KeyedJagged(["clicked"], part.values() + 1, lengths=part.lengths()))


def test_a_backward_for_each_loss():
    """The lookups of a step share one node, so a second backward would update its rows twice."""
    tower = Tower()
    with skirl.lookahead(batches(1), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            losses = [tower.look_up(ids.select([name]))[name].sum() for name in ("user", "clicked")]
            losses[0].backward(retain_graph=True)
            with pytest.raises(RuntimeError, match=r"backward ran twice.*Sum the losses and call it once"):
                losses[1].backward()


def test_two_lookups_without_a_lookahead():
    """Without a lookahead each is its own step, and the first one's rows may be gone."""
    tower, ids = Tower(), batches(1)[0]
    first = tower(ids)
    tower(ids)
    with pytest.raises(RuntimeError, match=r"not current any more.*several lookups of one batch need a"):
        first.backward()


def test_an_output_changed_in_place():
    """Another lookup would see the change: torch refuses, as for any view that a function returned."""
    tower = Tower()
    with skirl.lookahead(batches(1), tower, sparse=lambda ids: ids) as ahead:
        for ids in ahead:
            for out in (tower.rows(ids)["user"], tower.rows(ids).stacked()):
                with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                    relu_(out)


def test_other_weights_in_the_second_lookup():
    rows = skirl.EmbeddingBagCollection([Table("a", 10, 2)], optimizer=skirl.SGD(lr=1.0), cache=10)
    ids = KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))
    with skirl.lookahead([ids], rows, sparse=lambda ids: ids) as ahead:
        for got in ahead:
            rows(got)
            with pytest.raises(ValueError, match="the second lookup of a batch has new weights"):
                rows(KeyedJagged(["a"], got.values(), offsets=got.offsets(), weights=torch.ones(2) / 2))


@pytest.mark.parametrize("mode", ["eval", "ahead"])
def test_a_whole_batch_in_the_place_of_its_ids_is_refused_in_a_sentence(mode: str):
    ids = skirl.KeyedJagged.one_hot(["a"], torch.arange(4)[:, None])
    batch = skirl.Batch(torch.empty(4, 0), ids, torch.zeros(4))
    embeddings = skirl.EmbeddingBagCollection([skirl.Table("a", 9, 2)], optimizer=skirl.SGD(lr=0.1), cache=9)
    embeddings.train(mode != "eval")
    with (
        pytest.raises(TypeError, match=r"ids are a Batch, which has no keys\(\): pass its \.sparse"),
        skirl.lookahead([batch], embeddings) if mode == "ahead" else nullcontext([batch]) as batches,
    ):
        for yielded in batches:
            embeddings(yielded)
