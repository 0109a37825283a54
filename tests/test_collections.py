"""Several collections in one model: tables of different modules, pooled and unpooled, under one lookahead."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import skirl
from tests.cases import cases
from tests.streams import jagged, used_rows

USERS = [skirl.Table("user", 40, 4), skirl.Table("city", 9, 4, pooling="mean")]
ITEMS = [skirl.Table("item", 60, 8, features=("clicked", "bought"))]
FEATURES = {"user": 40, "city": 9, "clicked": 60, "bought": 60}


class Two(nn.Module):
    def __init__(self, cache: int | str = 12, store: str = "memory", **options: Any) -> None:
        super().__init__()
        second = store if store == "memory" else f"{store}-items"
        self.users = skirl.EmbeddingBagCollection(
            USERS, optimizer=skirl.Adam(lr=0.1), cache=cache, store=store, seed=3, **options
        )
        self.items = skirl.EmbeddingCollection(
            ITEMS, optimizer=skirl.Adagrad(lr=0.2), cache=cache, store=second, seed=4, **options
        )

    def loss(self, sparse: Any) -> torch.Tensor:
        return loss_of((*self.users(sparse).values(), *self.items(sparse).values()))


def loader(batches: int, seed: int = 0, samples: int = 3) -> list[skirl.KeyedJagged]:
    rng = np.random.default_rng(seed)
    return [jagged(rng, FEATURES, samples, most=2) for _ in range(batches)]


def train(
    model: Any, data: list[skirl.KeyedJagged], saves: Path | None = None, at: Sequence[int] = (), **options: Any
) -> list[float]:
    """Return the losses. saves: a folder to go on from, or, with `at`, to save to after these steps, up to the last."""
    losses = []
    with skirl.lookahead(data, model, sparse=lambda batch: batch, **options) as batches:
        if saves and not at:
            skirl.load(saves, model=model, data=batches)
        for sparse in batches:
            loss = model.loss(sparse) if isinstance(model, Two) else loss_of(model(sparse).values())
            loss.backward()
            losses.append(loss.item())
            if batches.step in at:
                skirl.save(saves, model=model, data=batches)
                if batches.step == at[-1]:
                    break
    return losses


def loss_of(parts: Iterable[torch.Tensor], first: int = 1) -> torch.Tensor:
    return sum(((first + i) * out).square().sum() for i, out in enumerate(parts))  # type: ignore[return-value]


def bits(model: Two) -> list[dict[int, bytes]]:
    return [used_rows(collection.engine) for collection in (model.users, model.items)]


@pytest.mark.parametrize("options", [{}, {"depth": 3, "prefetch": 0}, {"depth": "epoch"}, {"policy": "lru"}])
def test_two_collections_train_as_each_does_alone(options: dict[str, Any]):
    """Their losses add up, so neither affects the other: each trained alone has the same bits."""
    data, both = loader(30), Two()
    losses = train(both, data, **options)
    apart = Two(cache="100%")
    for collection in (apart.users, apart.items):
        with skirl.lookahead(data, collection, sparse=lambda batch: batch) as batches:
            for sparse in batches:
                first = 1 if collection is apart.users else 1 + len(USERS)
                loss_of(collection(sparse).values(), first).backward()
    assert bits(both) == bits(apart)
    assert both.users.engine.counters.fetched > 0 and both.items.engine.counters.fetched > 0
    assert losses == train(Two(cache="100%"), data)


def test_micro_batches_of_two_collections():
    data = loader(24)
    few, many = Two(cache=30), Two(cache="100%")
    assert train(few, data, accumulate=3) == train(many, data, accumulate=3)
    assert bits(few) == bits(many)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_two_collections_are_saved_and_loaded(tmp_path: Path, store: str):
    data = loader(20)

    def made(name: str) -> Two:
        return Two(store="memory" if store == "memory" else f"disk:{tmp_path / name}")

    whole = made("whole")
    expected = train(whole, data)
    train(made("saved"), data, tmp_path / "c", at=(4, 8))
    resumed = made("resumed")
    assert train(resumed, data, tmp_path / "c") == expected[8:]
    assert bits(resumed) == bits(whole)


def test_rows_of_two_collections_go_out_and_in(tmp_path: Path):
    trained = Two()
    train(trained, loader(10))
    skirl.export(trained, tmp_path / "rows.safetensors")
    skirl.save(tmp_path / "c", model=trained)
    for source in (tmp_path / "c", tmp_path / "rows.safetensors"):
        other = Two()
        assert skirl.import_rows(other, source).keys() == {"user", "city", "item"}
        assert bits(other) == bits(trained), "each with the state of its own optimizer"
        steps = [[c.engine.packs[0].steps.tolist() for c in (model.users, model.items)] for model in (other, trained)]
        assert steps[0] == steps[1]
        ids = loader(3, seed=5)
        with torch.no_grad():
            assert [trained.loss(one).item() for one in ids] == [other.loss(one).item() for one in ids]


DIMS = (3, 7, 8)


@st.composite
def needs(draw: st.DrawFn) -> tuple[int, list[list[list[int]]]]:
    """Batches of rows of two or three dims."""
    widths = draw(st.integers(2, 3))
    rows = st.lists(st.integers(0, 19), max_size=6)
    return widths, draw(st.lists(st.lists(rows, min_size=widths, max_size=widths), min_size=1, max_size=24))


def of_lists(batch: list[list[int]]) -> skirl.KeyedJagged:
    ids = torch.tensor([row for rows in batch for row in rows], dtype=torch.int64)
    return skirl.KeyedJagged([f"f{i}" for i in range(len(batch))], ids, lengths=torch.tensor([len(r) for r in batch]))


def run(widths: int, batches: list[list[list[int]]], cache: int | str, **options: Any) -> tuple[Any, ...]:
    tables = [skirl.Table(f"f{i}", 20, dim) for i, dim in enumerate(DIMS[:widths])]
    rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adagrad(lr=0.3), cache=cache, seed=1)
    losses = train(rows, [of_lists(batch) for batch in batches], **options)
    if isinstance(cache, int):
        unused = widths - 1  # a bank that no batch uses still has one slot
        assert rows.engine.capacity.split is None or sum(rows.engine.capacity.split.slots) <= cache + unused
    return losses, used_rows(rows.engine)


def least(batches: list[list[list[int]]]) -> int:
    return max(1, max(sum(len(set(rows)) for rows in batch) for batch in batches))


@cases(120)
@given(given=needs(), depth=st.sampled_from([1, 3, "auto", "epoch"]), prefetch=st.integers(0, 2))
def test_the_least_cache_holds_every_batch_however_its_widths_change(given: Any, depth: Any, prefetch: int):
    widths, batches = given
    assert run(widths, batches, least(batches), depth=depth, prefetch=prefetch) == run(widths, batches, "100%")


def test_without_a_lookahead_the_cache_is_split_anew_as_well():
    tables = [skirl.Table("f0", 20, 3), skirl.Table("f1", 20, 7)]
    batches = [[[1, 2, 3], []], [[], [4, 5, 6]], [[1], [4, 5]], [[1, 2, 3], []]] * 3

    def trained(cache: int | str) -> dict[int, bytes]:
        rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adam(lr=0.3), cache=cache)
        for batch in batches:
            loss_of(rows(of_lists(batch)).values()).backward()
        return used_rows(rows.engine)

    assert trained(3) == trained("100%")


def test_a_run_goes_on_after_a_split_that_a_checkpoint_saw(tmp_path: Path):
    rng = np.random.default_rng(1)
    batches = [[list(rng.integers(0, 20, n)), list(rng.integers(0, 20, 6 - n))] for n in rng.integers(0, 7, 30)]
    tables = [skirl.Table("f0", 20, 3), skirl.Table("f1", 20, 7)]
    data = [of_lists(batch) for batch in batches]

    def made() -> skirl.EmbeddingBagCollection:
        return skirl.EmbeddingBagCollection(tables, optimizer=skirl.Adam(lr=0.3), cache=least(batches))

    whole, resumed = made(), made()
    train(whole, data, depth=4)
    train(made(), data, tmp_path, at=(17,), depth=4)
    train(resumed, data, tmp_path, depth=4)
    assert used_rows(resumed.engine) == used_rows(whole.engine)
