"""The training loop: its results, whatever watches it, and golden traces of its losses."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl.cli.train import Train
from skirl.core.tables import Schema
from skirl.data import Synthetic
from skirl.models import DLRM
from skirl.train.loop import keys_of, steps
from skirl.train.recipe import Recipe

TINY: dict[str, Any] = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 8, "batch": 64}


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def train(**flags: Any) -> dict[str, Any]:
    return Train.of(**{**TINY, "steps": 40, "quiet": True, **flags}).run()


def losses(recipe: Recipe) -> list[float]:
    embeddings = recipe.embeddings(recipe.cache_size(0))
    model, dense = recipe.model_over(embeddings)
    with recipe.lookahead(model) as batches:
        return [done.loss for done in steps(model, dense, batches)]


GOLDEN: dict[str, dict[str, Any]] = {
    "tiny-rowwise-adagrad": {},
    "tiny-sgd": {"optimizer": "sgd", "lr": 0.5},
    "tiny-adagrad": {"optimizer": "adagrad"},
    "tiny-adam-multi-hot": {"optimizer": "adam", "lr": 0.005, "pooling_factor": 3, "cache": "2500"},
    "criteo-kaggle-rowwise-adagrad": {
        "data": "synthetic:criteo-kaggle",
        "rows_scale": 0.01,
        "cache": "3000",
        "seed": 7,
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_losses(golden, name):
    golden(name, losses(Recipe.of(**{**TINY, "steps": 60, "cache": "1000", **GOLDEN[name]})))


def test_the_loop_is_the_loop_of_the_readme():
    recipe = Recipe.of(**TINY, steps=30, cache="1000")
    data = Synthetic("tiny", batch_size=64, batches=30)
    embeddings = skirl.EmbeddingBagCollection(data.tables(8), optimizer=skirl.RowwiseAdagrad(lr=0.02), cache=500)
    torch.manual_seed(0)
    model = DLRM.tiny(embeddings, dense_features=4)
    dense = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)  # other bits than one tensor at a time
    expected = []
    with skirl.lookahead(data, model) as batches:
        for batch in batches:
            loss = model.loss(batch)
            loss.backward()
            dense.step()
            dense.zero_grad()
            expected.append(loss.item())
    assert losses(recipe) == expected


def test_a_report_counts_what_happened():
    report = train(cache="touched:25%")
    rows, moved = report["rows"], report["counters"]
    schema, batches = Schema.of(Synthetic("tiny").tables(8)), itertools.islice(Synthetic("tiny", batch_size=64), 40)
    touched = len(np.unique(np.concatenate([keys_of(batch.sparse, schema) for batch in batches])))
    assert rows["touched"] == touched == moved["new"]
    assert rows["cache"] == touched // 4 == rows["in_cache"]
    assert rows["tables"] == 72_327
    assert report["cache_bytes"] == rows["cache"] * (8 + 1) * 4
    # Rows that came in and are no longer in the cache were written.
    assert moved["new"] + moved["fetched"] - moved["written"] == rows["in_cache"]
    assert report["samples"] == 40 * 64


SHARDED: dict[str, Any] = {**TINY, "dim": 4, "batch": 32, "quiet": True}


def test_a_run_goes_on_with_its_shards(tmp_path):
    """It has the bits of a run that never stopped. Another number of shards is refused before anything is read."""
    run = {**SHARDED, "run": "none", "shards": 2, "cache": "touched:50%"}
    whole = Train.of(**run, steps=6).run()
    first = Train.of(**run, steps=3, save=tmp_path).run()
    assert (first["steps"], first["checkpoints"]["newest"], first["failed"]) == (3, 3, None)
    then = Train.of(**run, steps=6, save=tmp_path, resume=True).run()
    assert then["loss"]["digest"] == whole["loss"]["digest"] and then["checkpoints"]["newest"] == 6
    assert whole["samples"] == 6 * 32
    with pytest.raises(ValueError, match="--shards is 4, the run was saved with 2"):
        Train.of(**(run | {"shards": 4}), steps=8, save=tmp_path, resume=True).run()
