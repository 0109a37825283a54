"""The training loop: its results, golden traces of its losses, and runs repeated with --config from the files they left."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skirl
from skirl.cli import main
from skirl.cli.train import Train
from skirl.core.tables import Schema
from skirl.data import Synthetic
from skirl.models import DLRM
from skirl.train.loop import keys_of, steps
from skirl.train.recipe import Recipe

TINY: dict[str, Any] = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 8, "batch": 64}


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


def test_data_that_ends_before_the_steps_asked_for_is_said(tmp_path, capsys):
    (tmp_path / "clicks.csv").write_text("click,item\n" + "".join(f"{n % 2},{n}\n" for n in range(40)))
    (tmp_path / "clicks.toml").write_text('[[label]]\nname = "click"\n[[id]]\nname = "item"\ntype = "int"\nrows = 90\n')
    words = ["train", f"csv:{tmp_path / 'clicks.csv'}", "--schema", str(tmp_path / "clicks.toml"), "--cache", "90"]
    assert main([*words, "--model", "dlrm-tiny", "--dim", "4", "--batch", "16", "--steps", "9", "--run", "none"]) == 0
    assert "; the data has no more for --steps 9" in capsys.readouterr().out


def test_threads_are_the_machines_and_a_resumed_run_keeps_those_it_began_with(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"SKIRL_RUNS": "none"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert main(["--version"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    first = Train.of(**SHARDED, steps=3, save=tmp_path).run()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    then = Train.of(**SHARDED, steps=6, save=tmp_path, resume=True).run()
    assert first["threads"] == then["threads"] == 2 and [change["flag"] for change in then["changes"]] == ["steps"]
    assert Train.of(**SHARDED, steps=1).run()["threads"] == 1
    other = Train.of(**SHARDED, steps=8, save=tmp_path, resume=True, threads=1).run()
    assert [change["flag"] for change in other["changes"]] == ["steps", "threads"]


def test_a_folder_of_another_version_is_not_begun_anew(tmp_path):
    (tmp_path / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no checkpoint"):
        Train.of(**SHARDED, run="none", steps=1, save=tmp_path, resume=True).run()


FLAGS = "--data synthetic:tiny --model dcnv2-tiny --deep 9,5 --dim 4 --batch 32 --steps 12 --valid 25% --eval-every 5"
SEED = "--seed 3 --lr 0.1 --cache touched:50% --optimizer adam --schedule linear --threads 1 --quiet"


def test_a_run_and_its_repetition_have_the_same_bits(tmp_path: Path, as_json: Any) -> None:
    folder = tmp_path / "first"
    writes = ["--run", str(folder), "--save", str(tmp_path / "saved"), "--save-every", "5"]
    first = as_json("train", *FLAGS.split(), *SEED.split(), *writes)
    for path in (folder, folder / "config.json"):
        again = as_json("train", "--config", str(path), "--quiet")
        for what in ("loss", "auc", "test_logloss", "counters", "rows"):
            assert again[what] == first[what]
        assert again["save"] is None and again["run"] is None  # tests set SKIRL_RUNS=none
