"""Rows that are looked up but not trained, as people freeze weights in PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skirl
from tests.habits.two_tables import NAMES, ROWS, Bags, Model, collection, equal, loader, rows_of, train


def both(optimizer: Any = None, cache: int | str = 16) -> tuple[Model, Model]:
    return Model(collection(optimizer, cache)), Model(Bags())


def plain_sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.rows.parameters(), lr=0.1)


@pytest.mark.parametrize("what", ["the collection", "the model that holds it"])
def test_requires_grad_false(what: str) -> None:
    """Rows keep their bits through cache and store, and the dense part trains as in plain PyTorch."""
    ours, plain = both(skirl.Adam(weight_decay=0.1))
    before = rows_of(ours)
    for model in (ours, plain):
        (model if what.startswith("the model") else model.rows).requires_grad_(False)
        model.top.requires_grad_(True)
    equal(after := train(ours), train(plain))
    assert all(torch.equal(after[name], before[name]) for name in NAMES)
    assert ours.rows.frozen == ("user", "item")
    assert ours.rows.engine.table_steps.tolist() == [0, 0]
    assert ours.rows.engine.counters.fetched > 0


def test_unfreezing_after_some_steps() -> None:
    ours, plain = both()
    found = []
    for model, rows in ((ours, None), (plain, plain_sgd(plain))):
        model.rows.requires_grad_(False)
        found.append(train(model, rows=rows, each=lambda step, m=model: m.rows.requires_grad_(step >= 5)))
    equal(*found)
    assert not torch.equal(found[0]["user"], rows_of(both()[0])["user"])


def test_one_table_of_two() -> None:
    ours, plain = both()
    before = rows_of(ours)
    ours.rows.freeze("item")
    plain.rows.bags["item"].requires_grad_(False)
    equal(after := train(ours), train(plain, rows=plain_sgd(plain)))
    assert torch.equal(after["item"], before["item"]) and not torch.equal(after["user"], before["user"])
    ours.rows.unfreeze("i*")
    assert not torch.equal(train(ours)["item"], before["item"])


def test_detach_of_an_output() -> None:
    def loss(model: Model, ids: Any) -> torch.Tensor:
        out = model.rows(ids)
        return model.top(torch.cat([out["user"], out["item"].detach()], 1)).square().sum()

    ours, plain = both()
    before = rows_of(ours)
    equal(after := train(ours, loss=loss), train(plain, loss=loss, rows=plain_sgd(plain)))
    assert torch.equal(after["item"], before["item"])


def test_outputs_want_a_gradient_where_their_rows_are_trained() -> None:
    ours, plain = both()
    ours.rows.freeze("item")
    plain.rows.bags["item"].requires_grad_(False)
    ids = loader(1)[0]
    for rows in (ours.rows, plain.rows):
        assert [rows(ids)[name].requires_grad for name in NAMES] == [True, False]
    assert not ours.rows.requires_grad_(False)(ids).stacked().requires_grad


def test_weights_of_ids_are_trained_over_frozen_rows() -> None:
    ids = torch.tensor([3, 9, 3, 0])
    plain = nn.EmbeddingBag.from_pretrained(torch.randn(10, 2), mode="sum")
    ours = skirl.EmbeddingBag.from_pretrained(plain.weight, mode="sum", optimizer=skirl.SGD(lr=0.1), cache=8)
    gradients = []
    for bag in (plain, ours):
        weights = torch.arange(4.0, requires_grad=True)
        bag(ids, torch.tensor([0, 3]), weights).square().sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients)
    assert torch.equal(ours.eval()(torch.arange(10)[:, None]), plain.weight)


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


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ((), r"no table given: name tables, or use requires_grad_\(False\)"),
        (("usr*",), r"no table 'usr\*': there are 'user', 'item'"),
        (("user", "x"), "no table 'x': there are 'user', 'item'"),
    ],
)
def test_tables_that_are_not_there(tables: tuple[str, ...], says: str) -> None:
    rows = collection()
    with pytest.raises(ValueError, match=says):
        rows.freeze(*tables)
    assert rows.frozen == ()


def test_a_checkpoint_knows_what_was_frozen(tmp_path: Path) -> None:
    saved, other = Model(collection()), Model(collection())
    saved.rows.freeze("item")
    train(saved)
    skirl.save(tmp_path, model=saved)
    with pytest.raises(skirl.CheckpointError, match=r"with table 'item'\.frozen = True, here it is False: set it to"):
        skirl.load(tmp_path, model=other)
    other.rows.freeze("item")
    skirl.load(tmp_path, model=other)
    equal(rows_of(other), rows_of(saved))
    assert len(rows_of(other)["item"]) == ROWS


# Between two lookups of one batch.


def two_lookups(between: Any, *, stacked: bool = False) -> Any:
    """Return a loss over two lookups; `between` is called before and after the second one."""

    def of(model: Model, ids: Any) -> torch.Tensor:
        out = model.rows(ids)
        if stacked and not isinstance(model.rows, Bags):
            return model.top(out.stacked().flatten(1))
        return model.top(torch.cat([out[name] for name in NAMES], 1))

    def loss(model: Model, ids: Any) -> torch.Tensor:
        first = of(model, ids)
        between(model, True)
        second = of(model, ids)
        between(model, False)
        return (first * 2 + second.square()).sum()

    return loss


def freeze_all(model: Model, frozen: bool) -> None:
    model.rows.requires_grad_(not frozen)


def freeze_item(model: Model, frozen: bool) -> None:
    if isinstance(model.rows, Bags):
        model.rows.bags["item"].requires_grad_(not frozen)
    else:
        (model.rows.freeze if frozen else model.rows.unfreeze)("item")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("freeze", [freeze_all, freeze_item])
def test_freezing_between_two_lookups_of_a_batch(freeze: Any, stacked: bool) -> None:
    ours, plain = both()
    loss = two_lookups(freeze, stacked=stacked)
    equal(train(ours, loss=loss), train(plain, loss=loss, rows=plain_sgd(plain)))


def test_unfreezing_a_table_between_two_lookups_of_a_batch_is_refused() -> None:
    ours, _ = both()
    freeze_item(ours, True)
    loss = two_lookups(lambda model, begins: freeze_item(model, not begins))
    says = (
        "^rows were unfrozen between two lookups of one batch, and the first trains other tables: do so before the first, "
        r"and call \.detach\(\) on an output that is to train no row$"
    )
    with pytest.raises(RuntimeError, match=says):
        train(ours, loss=loss)


def test_freezing_between_two_lookups_with_trained_weights_is_refused() -> None:
    rows = skirl.EmbeddingBagCollection([skirl.Table("item", 9, 2)], optimizer=skirl.SGD(), cache=9)
    ids = skirl.KeyedJagged(
        ["item"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.ones(2, requires_grad=True)
    )
    with skirl.lookahead([ids], rows, sparse=lambda ids: ids) as batches:
        for batch in batches:
            rows(batch)
            rows.requires_grad_(False)
            plain = skirl.KeyedJagged(["item"], batch.values(), offsets=batch.offsets(), weights=torch.ones(2))
            with pytest.raises(RuntimeError, match=r"^rows were frozen between two lookups of one batch, and the"):
                rows(plain)
