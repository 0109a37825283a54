"""Reading ahead during an evaluation: the same rows one batch early, and nothing else changes."""

import copy
import itertools
import threading
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

import skirl
from skirl import KeyedJagged
from skirl.data import Synthetic
from skirl.nn.collection import collection_of
from skirl.pipeline.read_ahead import read_ahead
from skirl.train.evaluation import evaluate
from tests.store.links import behind_a_link


def made(store: Any = "memory", *, pooled: bool = True) -> tuple[nn.Module, list[skirl.Batch]]:
    """Return a model that has been trained, and batches to evaluate it on; most of their rows are not resident."""
    data = Synthetic("tiny", batch_size=64, batches=12, pooling_factor=3, held_out_batches=6)
    kind = skirl.EmbeddingBagCollection if pooled else skirl.EmbeddingCollection
    rows = kind(data.tables(4), optimizer=skirl.Adagrad(lr=0.1), cache=1500, store=store)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, batch: skirl.Batch) -> torch.Tensor:
            found = self.rows(batch.sparse)
            if pooled:
                return sum(found.values(), torch.zeros(64, 4)).sum(1)
            return sum((part.sum() for part in found.values()), torch.zeros(())) + torch.zeros(64)

    model = Sums()
    with skirl.lookahead(data, model) as batches:
        for batch in batches:
            model(batch).square().mean().backward()
    assert data.held_out is not None
    return model, list(data.held_out)


def looked_up_late(model: nn.Module, batches: list[skirl.Batch]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.eval()(batch) for batch in batches]


@pytest.mark.parametrize("store", ["memory", "disk", "link"])
@pytest.mark.parametrize("pooled", [True, False])
def test_rows_read_ahead_are_the_rows(store, pooled, tmp_path):
    with behind_a_link("1Gbit,1ms") if store == "link" else nullcontext():
        model, batches = made(f"disk:{tmp_path / 'rows'}" if store == "disk" else "memory", pooled=pooled)
    expected = looked_up_late(model, batches)
    counters = asdict(collection_of(model).engine.counters)
    reused = copy.deepcopy(batches[0])

    def filled_anew():
        """A loader that yields the same tensors each time, with new numbers in them."""
        for batch in batches:
            reused.sparse = KeyedJagged(reused.sparse.keys(), buffer[: len(batch.sparse.values())], offsets=offsets)
            reused.sparse.values().copy_(batch.sparse.values())
            offsets.copy_(batch.sparse.offsets())
            yield reused

    buffer, offsets = torch.zeros(10_000, dtype=torch.int64), batches[0].sparse.offsets().clone()
    for loader in (batches, filled_anew()):
        with torch.no_grad(), read_ahead(model, loader) as ahead:
            assert all(torch.equal(model(batch), late) for batch, late in zip(ahead, expected, strict=True))
    assert asdict(collection_of(model).engine.counters) == counters
    assert not [thread for thread in threading.enumerate() if thread.name == "skirl-evaluation"]


def test_the_next_rows_are_read_while_the_model_computes(monkeypatch):
    model, batches = made()
    collection = collection_of(model)
    began, look_up = [threading.Event() for _ in batches], collection.looked_up
    number = itertools.count()

    def slow(*sparse_and_rows):
        assert threading.current_thread().name == "skirl-evaluation"
        began[next(number)].set()
        return look_up(*sparse_and_rows)

    monkeypatch.setattr(collection, "looked_up", slow)
    with torch.no_grad(), read_ahead(model.eval(), batches) as ahead:
        for at, batch in enumerate(ahead):
            model(batch)
            assert at + 1 == len(batches) or began[at + 1].wait(60), "before the loop asks for it"
            assert not any(event.is_set() for event in began[at + 2 :]), "and no more than one"


def test_a_failure_of_the_store_comes_out_of_the_model(monkeypatch):
    model, batches = made()
    monkeypatch.setattr(collection_of(model).engine.store, "read", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(model, batches)
    assert model.training and not [t for t in threading.enumerate() if t.name == "skirl-evaluation"]


def test_a_model_that_changes_its_ids_or_has_no_rows_is_evaluated_all_the_same():
    model, batches = made()

    class Shifted(nn.Module):
        """Gives its embeddings changed ids."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: skirl.Batch) -> torch.Tensor:
            ids = batch.sparse
            other = KeyedJagged(ids.keys(), ids.values() % 7, offsets=ids.offsets())
            return self.inner(skirl.Batch(batch.dense, other, batch.labels))

    shifted = Shifted()
    expected = looked_up_late(shifted, batches)
    with torch.no_grad(), read_ahead(shifted, batches) as ahead:
        assert all(torch.equal(shifted(batch), late) for batch, late in zip(ahead, expected, strict=True))

    class Rate(nn.Module):
        def forward(self, batch: skirl.Batch) -> torch.Tensor:
            return torch.zeros(len(batch.labels))

    assert evaluate(Rate(), batches).samples == 6 * 64
