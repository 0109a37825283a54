"""Evaluation during training: its results, that it changes nothing, and when it stops a run."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import skirl
from skirl.cli import main
from skirl.cli.train import Train
from skirl.data import Synthetic
from skirl.models import DLRM
from skirl.train.metrics import evaluate
from skirl.train.run_folder import lines_of
from tests.train.test_metrics import plain_auc

SMALL: dict[str, Any] = {
    "data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 8, "batch": 64, "steps": 40, "cache": "600", "valid": "20%",
    "quiet": True,
}  # fmt: skip


def train(**flags: Any) -> dict[str, Any]:
    return Train.of(**{**SMALL, **flags}).run()


@pytest.mark.parametrize("flags", [{}, {"depth": "epoch", "optimizer": "adam", "policy": "lru"}])
def test_evaluation_changes_no_bit_and_moves_no_row(flags):
    without, found = train(valid=None, **flags), train(eval_every=3, **flags)
    for what in ("loss", "auc", "logloss", "counters", "rows"):
        assert found[what] == without[what]
    assert found["counters"]["fetched"] > 0
    assert "test_auc" not in without and found["test_samples"] == 8 * 64


def test_it_draws_no_random_number_of_the_run_and_puts_every_module_back():
    embeddings = skirl.EmbeddingBagCollection(Synthetic("tiny").tables(4), optimizer=skirl.SGD(lr=0.1), cache=1000)
    model = DLRM.tiny(embeddings, dense_features=4)
    frozen = nn.Dropout()
    model.add_module("frozen", frozen.eval())

    def drawing():
        for batch in itertools.islice(Synthetic("tiny", batch_size=16), 3):
            _ = torch.rand(3), np.random.rand()  # noqa: NPY002
            yield batch

    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    evaluate(model, drawing())
    assert torch.equal(torch.rand(2), expected)
    assert model.training and embeddings.training and not frozen.training

    def broken():
        yield from drawing()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        evaluate(model, broken())
    assert model.training and not frozen.training


def test_the_scores_are_those_of_all_logits_at_once():
    found = train(eval_every=40)
    recipe = Train.of(**SMALL).recipe
    stream = recipe.stream()
    embeddings = recipe.embeddings(recipe.cache_size(0))
    model, dense = recipe.model_over(embeddings)
    with recipe.lookahead(model, stream) as batches:
        for batch in batches:
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            dense.zero_grad()
            loss.backward()
            dense.step()
    assert stream.held_out is not None
    with torch.no_grad():
        model.eval()
        pairs = [(model(batch), batch.labels) for batch in stream.held_out]
    logits, labels = (torch.cat(parts).double() for parts in zip(*pairs))
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    rate = labels.mean().item()
    assert found["test_samples"] == len(labels)
    assert found["test_auc"] == pytest.approx(plain_auc(logits.numpy(), labels.numpy()), abs=2e-4)  # bins
    assert found["test_logloss"] == pytest.approx(loss, rel=1e-12)
    assert found["test_ne"] == pytest.approx(
        loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)), rel=1e-12
    )
    assert found["test_calibration"] == pytest.approx(logits.sigmoid().mean().item() / rate, rel=1e-12)


def test_evaluations_are_shown_as_they_happen_and_come_first_in_the_summary(tmp_path, capsys):
    flags = [word for name, value in SMALL.items() if name != "quiet" for word in (f"--{name}", str(value))]
    run = tmp_path / "run"
    assert main(["train", *flags, "--lr", "0.5", "--dense-lr", "0.05", "--eval-every", "10", "--run", str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    found = {line["step"]: line for line in lines_of(run) if line["kind"] == "eval"}
    best = min(found, key=lambda step: found[step]["test_logloss"])
    assert best < 40 and found[40]["test_ne"] > 1, "it was to get worse"
    told = [line for line in shown if line.startswith("evaluation at step ")]
    assert [*found] == [10, 20, 30, 40] and len(told) == 4
    for (step, line), text in zip(found.items(), told, strict=True):
        assert text.startswith(f"evaluation at step {step}/40 · test log loss {line['test_logloss']:.4f} · AUC ")
    assert told[-1].endswith(f" · best {found[best]['test_logloss']:.4f} at step {best}")
    test, then = [line.split(maxsplit=1) for line in shown[shown.index(told[-1]) + 2 :]][:2]
    assert test[0] == "test" and f"log loss {found[40]['test_logloss']:.4f}" in test[1]
    assert "worse than predicting the click rate" in test[1]
    assert then[0] == "best" and then[1].startswith(f"step {best}, ") and "--keep-best" in then[1]


def test_a_run_that_overfits_stops_and_stays_stopped(tmp_path):
    flags: dict[str, Any] = {"steps": 200, "lr": 1.0, "eval_every": 2, "patience": 3, "save": tmp_path}
    found = train(**flags)
    assert found["stopped_early"] and found["steps"] < 200 and found["steps"] % 2 == 0
    again = train(**flags, resume=True)
    assert again["steps"] == found["steps"] == again["begun_at"]
    assert again["test_logloss"] == found["test_logloss"]
    assert train(**{**flags, "patience": 8}, resume=True)["steps"] > found["steps"]
