"""The batch that a forward gets, habits that would look up rows of another one, and several lookups in one step."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import skirl
from skirl import KeyedJagged, Table
from tests.habits.plain import Plain, Tower, assert_equal, batches, first_rows, train

OTHERS = r"got other ids of feature '\w+'.*Take batches only from the lookahead.*change ids before"


@pytest.fixture
def tower() -> Tower:
    return Tower()


def looped(tower: Tower, data: list[KeyedJagged]) -> skirl.Lookahead:
    return skirl.lookahead(data, tower, sparse=lambda ids: ids)


def test_ids_dropped_in_place(tower):
    with looped(tower, batches(1)) as ahead, pytest.raises(ValueError, match=OTHERS):
        for ids in ahead:
            ids.values().numpy()[8:] = 0
            tower(ids)


def test_ids_of_another_dtype_are_the_same_ids(tower):
    """`ids.long()` in forward."""
    data = batches(3)
    narrow = [KeyedJagged(ids.keys(), ids.values().int(), lengths=ids.lengths()) for ids in data]

    def forward(model: Tower, ids: KeyedJagged) -> torch.Tensor:
        return model(KeyedJagged(ids.keys(), ids.values().long(), lengths=ids.lengths()))

    assert_equal(train(Tower(), narrow, forward=forward), train(Plain(), data))


def test_a_batch_size_of_each_feature_is_refused_by_name():
    """As torchrec's tensor has it; tests/core/test_inverse.py has those that say which bag is whose."""
    rows = skirl.EmbeddingBagCollection([Table("a", 10, 2), Table("b", 10, 2)], optimizer=skirl.SGD(lr=1.0), cache=10)
    answers = {
        "keys": ["a", "b"], "values": torch.tensor([1, 2, 3, 4]), "offsets": torch.tensor([0, 1, 2, 3, 4]),
        "weights_or_none": None, "variable_stride_per_key": True, "stride_per_key": [1, 3], "inverse_indices_or_none": None,
    }  # fmt: skip
    varying = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
    with pytest.raises(ValueError, match=r"different numbers of bags \(stride_per_key\)"):
        rows(varying)


@pytest.mark.parametrize("save", [False, True])
def test_ids_on_a_device_are_refused_at_a_later_step_or_save(save, monkeypatch, tmp_path):
    """Where comparing would wait for a GPU, the error comes later, and says that wrong rows were trained."""
    tower = Tower()
    same = tower.rows.current.same
    monkeypatch.setattr(same, "check", lambda sparse, captured: same._compare_later(sparse, captured) or True)
    data = batches(3)
    with looped(tower, data) as ahead, pytest.raises(ValueError, match=r"other ids.*has trained wrong rows: resume"):
        for step, ids in enumerate(ahead):
            tower(data[2] if step == 0 else ids).backward()
            if save:
                skirl.save(tmp_path / "save", model=tower, data=ahead)
    assert not list(tmp_path.glob("save/*.json"))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_weights_made_in_the_loop_are_refused(again: bool, trained: bool) -> None:
    rows = skirl.EmbeddingBagCollection([Table("a", 10, 2)], optimizer=skirl.SGD(lr=1.0), cache=10)
    ids = KeyedJagged.one_hot(["a"], torch.tensor([[1], [2]]))
    weights = (torch.ones(2) / 2).requires_grad_(trained)
    with skirl.lookahead([ids], rows, sparse=lambda ids: ids) as ahead:
        for got in ahead:
            if again:
                rows(got)
            with pytest.raises(ValueError, match="forward takes weights of ids as the lookahead yielded them"):
                rows(KeyedJagged(["a"], got.values(), offsets=got.offsets(), weights=weights))


def test_a_backward_that_was_forgotten_is_said_once(caplog: pytest.LogCaptureFixture):
    """At the next batch; not of steps that train, of frozen rows, or of looking up alone."""
    rows = skirl.EmbeddingBagCollection([skirl.Table("a", 9, 2)], optimizer=skirl.SGD(lr=0.1), cache=9)
    loader = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i]])) for i in range(6)]
    with skirl.lookahead(loader, rows) as batches:
        for ids in batches:
            if batches.step == 1:
                rows(ids)["a"].sum().backward()
            elif batches.step == 2:
                rows.requires_grad_(False)
                rows(ids)
            elif batches.step == 3:
                rows.requires_grad_(True)
            else:
                assert "backward" not in caplog.text or batches.step > 4
                rows(ids)
    assert caplog.text.count("had no backward") == 1 and "step 4 looked rows up" in caplog.text


Model = Tower | Plain


def two_towers(model: Model, ids: KeyedJagged) -> Tensor:
    """One lookup for each tower, with in-batch negatives: each user against each item."""
    user = model.look_up(ids.select(["user"]))["user"]
    items = model.look_up(ids.select(["bought", "clicked"]))
    scores = user @ (items["clicked"] + items["bought"]).t()
    return torch.nn.functional.cross_entropy(scores * 50, torch.arange(len(user))) + model.top(user).square().sum()


def twice(model: Model, ids: KeyedJagged) -> Tensor:
    return model(ids) + 3 * model(ids)


def overlapping(model: Model, ids: KeyedJagged) -> Tensor:
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


def test_a_whole_batch_in_the_place_of_its_ids_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match=r"ids are a Batch, which has no keys\(\): pass its \.sparse"):
        Tower().rows.eval()(skirl.Batch(torch.empty(8, 0), batches(1)[0], torch.zeros(8)))
