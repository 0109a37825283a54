"""Rows that are looked up but not trained, as people freeze weights in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skirl
from tests.habits.plain import Plain, Tower, assert_equal, batches, rows_of, train

DATA = batches(12)


def freeze_all(model: Tower | Plain, frozen: bool = True) -> None:
    model.rows.requires_grad_(not frozen)


def freeze_item(model: Tower | Plain, frozen: bool = True) -> None:
    if isinstance(model, Plain):
        model.rows["item"].requires_grad_(not frozen)
    else:
        (model.rows.freeze if frozen else model.rows.unfreeze)("i*")


@pytest.mark.parametrize("what", ["the collection", "the model that holds it"])
def test_requires_grad_false(what: str) -> None:
    """Rows keep their bits through cache and store, and the dense part trains as in plain PyTorch."""
    ours, plain = Tower(optimizer=skirl.Adam(weight_decay=0.1), cache=40), Plain()
    before = rows_of(ours)
    for model in (ours, plain):
        (model if what.startswith("the model") else model.rows).requires_grad_(False)
        model.top.requires_grad_(True)
    assert_equal(after := train(ours, DATA), train(plain, DATA))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert ours.rows.frozen == ("user", "item")
    assert ours.rows.engine.packs[0].steps.tolist() == [0, 0]
    assert ours.rows.engine.counters.fetched > 0


def test_unfreezing_after_some_steps() -> None:
    found = []
    for model in (Tower(), Plain()):
        found.append(train(model, DATA, each=lambda step, m=model: freeze_all(m, step < 5)))
    assert_equal(*found)
    assert not torch.equal(found[0]["user"], rows_of(Tower())["user"])


def test_one_table_of_two() -> None:
    ours, plain = Tower(), Plain()
    before = rows_of(ours)
    for model in (ours, plain):
        freeze_item(model)
        assert [out.requires_grad for out in model.look_up(DATA[0]).values()] == [True, False, False]
    assert_equal(after := train(ours, DATA), train(plain, DATA))
    assert torch.equal(after["item"], before["item"]) and not torch.equal(after["user"], before["user"])
    freeze_item(ours, False)
    assert not torch.equal(train(ours, DATA)["item"], before["item"])
    freeze_all(ours)
    assert not ours.rows(DATA[0]).stacked().requires_grad


@pytest.mark.parametrize("freeze", [None, True, False])
def test_from_pretrained_freezes_unless_told_not_to(freeze: bool | None) -> None:
    weight = torch.randn(10, 2)
    options: dict[str, Any] = {"mode": "sum"} if freeze is None else {"mode": "sum", "freeze": freeze}
    plain = nn.EmbeddingBag.from_pretrained(weight.clone(), **options)
    ours = skirl.EmbeddingBag.from_pretrained(weight, **options, optimizer=skirl.SGD(lr=0.1), cache=8)
    assert ours(torch.tensor([[1]])).requires_grad == plain.weight.requires_grad
    if not plain.weight.requires_grad:
        return
    rows = torch.optim.SGD(plain.parameters(), lr=0.1)
    for bag in (plain, ours):
        bag(torch.tensor([[1, 2]])).square().sum().backward()
    rows.step()
    torch.testing.assert_close(ours.eval()(torch.arange(10)[:, None]), plain.weight.detach())


def test_a_table_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no table 'usr\*': there are 'user', 'item'"):
        Tower().rows.freeze("usr*")


def test_a_checkpoint_knows_what_was_frozen(tmp_path: Path) -> None:
    saved, other = Tower(), Tower()
    freeze_item(saved)
    train(saved, DATA)
    skirl.save(tmp_path, model=saved)
    with pytest.raises(skirl.CheckpointError, match=r"with table 'item'\.frozen = True, here it is False: set it to"):
        skirl.load(tmp_path, model=other)
    freeze_item(other)
    skirl.load(tmp_path, model=other)
    assert_equal(rows_of(other), rows_of(saved))


@pytest.mark.parametrize("frozen", [True, False])
def test_freezing_between_two_lookups_of_a_batch_is_refused(frozen: bool) -> None:
    ours = Tower()
    freeze_item(ours, not frozen)

    def forward(model: Any, ids: skirl.KeyedJagged) -> Tensor:
        first = model(ids)
        freeze_item(model, frozen)
        return first + model(ids)

    says = (
        r"^rows were frozen or unfrozen between two lookups of one batch: do so before the first, and call \.detach\(\)"
    )
    with pytest.raises(RuntimeError, match=says):
        train(ours, DATA, forward=forward)
