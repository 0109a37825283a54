"""A cache on a GPU: it has the bits of the plain reference, with streams as late and in as odd an order as events allow."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl import Adam, KeyedJagged, RowwiseAdagrad, Table
from skirl.data import Synthetic
from skirl.engine.access import peek
from skirl.models import DLRM
from tests.cases import cases
from tests.engine.device.lazy import World
from tests.runs import Case, Part, Run
from tests.test_exact import cases_of

TABLES = (Table("a", 60, 3, features=("x", "y")), Table("b", 50_000_000, 5, pooling="mean"), Table("c", 40, 3))
BUSY = Case(
    TABLES, Adam(lr=0.05), (Part(0, 14, (9,)), Part(9, 14)), depth=3, weights=0.5, evaluate=0.2, device="interpret"
)
BACK_AND_FORTH = replace(
    BUSY, parts=(Part(0, 8, (5,)), Part(5, 8)), universe=12, optimizer=RowwiseAdagrad(lr=0.1), slow_write=0.003
)


@given(cases_of(10), st.sampled_from([0.0, 0.3, 0.7]))
@cases(5)
def test_every_bit_is_that_of_the_reference(case, eager):
    Run(replace(case, device="interpret", eager=eager)).go()


@pytest.mark.parametrize(("accumulate", "weights"), [(1, 0.0), (2, 0.5)])
def test_bags_that_samples_share(accumulate, weights):
    options = {"accumulate": accumulate, "weights": weights, "eager": 0.3, "parts": (Part(0, 4),)}
    Run(replace(BUSY, **options, shared=1.0, sizes=(3, 6), use="some", universe=60)).go()


@pytest.mark.parametrize(
    ("prefetch", "eager"),
    [(0, 0.0), (4, 0.5), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 0.5), (4, 0.0)))],
)
def test_rows_on_their_way_in_both_directions(prefetch, eager):
    report = Run(replace(BACK_AND_FORTH, prefetch=prefetch, eager=eager)).go()
    assert report.forwarded and report.fetched > report.forwarded


def trained(embeddings, batches, saved=None, loaded=None):
    """Save after the third step without waiting, while training goes on, or go on from there."""
    with skirl.lookahead(batches, embeddings, sparse=lambda ids: ids, depth=3) as ahead:
        if loaded:
            skirl.load(loaded, model=embeddings, optimizers=[], data=ahead)
            assert ahead.step == 3
        for ids in ahead:
            (embeddings(ids)["a"] ** 2).sum().backward()
            if saved and ahead.step == 3:
                skirl.save(saved, model=embeddings, optimizers=[], data=ahead, wait=False)


def every_row(embeddings):
    embeddings.flush()
    keys = np.sort(np.concatenate(list(embeddings.engine.store.held())))
    return keys, peek(embeddings.engine, keys, 0)


@pytest.mark.parametrize(("first", "then"), [("interpret", "cpu"), ("cpu", "interpret"), ("interpret", "interpret")])
def test_a_checkpoint_made_in_the_background_goes_on_anywhere(first, then, tmp_path, monkeypatch):
    """It has the rows of its step, although later steps change them before they have left the device."""
    monkeypatch.setattr("skirl.engine.device.gpu.Streams", World(1, 0.3).streams)
    tables = [Table("a", 60, 4)]
    rng = np.random.default_rng(0)
    batches = [KeyedJagged.one_hot(["a"], torch.from_numpy(rng.integers(0, 60, (6, 1)))) for _ in range(9)]
    options = {"optimizer": Adam(lr=0.1), "cache": 14}
    whole = skirl.EmbeddingBagCollection(tables, **options)
    trained(whole, batches)
    run = skirl.EmbeddingBagCollection(tables, **options, device=first)
    trained(run, batches, saved=tmp_path)
    np.testing.assert_array_equal(every_row(run)[1], every_row(whole)[1])
    run.close()
    resumed = skirl.EmbeddingBagCollection(tables, **options, device=then)
    trained(resumed, batches, loaded=tmp_path)
    np.testing.assert_array_equal(every_row(resumed)[0], every_row(whole)[0])
    np.testing.assert_array_equal(every_row(resumed)[1], every_row(whole)[1])


def losses_of(compiled, device="interpret", *, batch=16, steps=4, dim=4):
    """Train a model whose dense part is what `compiled` makes of it."""
    data, losses = Synthetic("tiny", batch_size=batch, batches=steps), []
    torch.manual_seed(0)
    embeddings = skirl.EmbeddingBagCollection(
        data.tables(dim), optimizer=RowwiseAdagrad(lr=0.1), cache="20%", device=device
    )
    at = embeddings.engine.device.at
    model = DLRM.tiny(embeddings, dense_features=4).to(at)
    dense, forward = torch.optim.Adam(model.parameters(), lr=1e-3), compiled(model)
    with skirl.lookahead(data, model) as batches:
        for batch in batches:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(forward(batch), batch.labels.to(at))
            loss.backward()
            dense.step()
            dense.zero_grad()
            losses.append(loss.item())
    embeddings.close()
    return losses


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads .grad
def test_a_compiled_model_breaks_its_graph_at_the_embeddings_and_trains_the_same_rows():
    assert losses_of(partial(torch.compile, backend="eager")) == losses_of(lambda model: model)
