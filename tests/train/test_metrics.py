"""Streaming metrics, compared with their definitions on few samples; and the meter, which waits for a GPU late."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl.train.metrics import Meter, Metrics
from tests.cases import cases


def plain_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC by definition: over all pairs of a click and another sample, how often the click scores higher."""
    clicks, others = scores[labels == 1, None], scores[labels == 0]
    return float(np.mean((clicks > others) + 0.5 * (clicks == others)))


def sample(n: int, seed: int, scale: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = scale * rng.standard_normal(n) - 1
    return logits, (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float64)


def scored(logits: np.ndarray, labels: np.ndarray) -> Any:
    metrics = Metrics()
    metrics.update(logits, labels)
    return metrics.scores()


@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.5, 20, 1e5])
def test_auc_is_the_definition_within_its_bins(scale: float) -> None:
    logits, labels = sample(4000, seed=1)
    assert abs(scored(logits * scale, labels).auc - plain_auc(logits, labels)) <= 2e-5


# With 9 bits after the leading one, these scores never share a bin, so the result has to be exact.
coarse = st.builds(math.ldexp, st.integers(-1023, 1023), st.integers(-20, 20))


@cases(200)
@given(st.lists(st.tuples(coarse, st.booleans()), min_size=1, max_size=60))
def test_auc_is_exact_for_scores_of_few_bits(pairs: list[tuple[float, bool]]) -> None:
    scores = np.array([score for score, _ in pairs])
    labels = np.array([float(label) for _, label in pairs])
    auc = scored(scores, labels).auc
    both = 0 < labels.sum() < len(labels)
    assert auc == (pytest.approx(plain_auc(scores, labels), abs=1e-14) if both else None)


@cases(100)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(0, 7), st.integers(0, 1000))
def test_metrics_go_on_from_a_checkpoint_with_every_bit(sizes: list[int], saved: int, seed: int) -> None:
    logits, labels = sample(sum(sizes), seed)
    parts = list(zip(np.split(logits, np.cumsum(sizes)[:-1]), np.split(labels, np.cumsum(sizes)[:-1])))
    whole, resumed = Metrics(), Metrics()
    for number, (x, y) in enumerate(parts):
        whole.update(torch.tensor(x), torch.tensor(y))
        resumed.update(torch.tensor(x), torch.tensor(y))
        if number == saved:
            state, resumed = resumed.state_dict(), Metrics()
            resumed.update(np.zeros(3), np.ones(3))  # overwritten by the state
            resumed.load_state_dict(state)
        if number % 2:
            resumed.scores()  # asking for scores changes nothing
    found = whole.scores()
    assert resumed.scores() == found
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(labels))
    assert found.samples == sum(sizes) and found.logloss == pytest.approx(float(loss), rel=1e-12)
    if 0 < labels.sum() < len(labels):
        assert found.auc == pytest.approx(plain_auc(logits, labels), abs=0.01)
    else:
        assert found.auc is None and found.ne is None


def test_what_is_changed_after_it_was_counted_changes_nothing() -> None:
    metrics, logits, labels = Metrics(), torch.tensor([0.5, -1.0]).double(), torch.tensor([1.0, 0.0]).double()
    metrics.update(logits, labels)
    logits.fill_(9.0)
    expected = Metrics()
    expected.update(np.array([0.5, -1.0]), np.array([1, 0]))
    assert metrics.scores() == expected.scores()


def test_what_would_corrupt_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="1 of 2 logits are not finite"):
        Metrics().update(torch.tensor([1.0, float("nan")]), torch.tensor([0.0, 1.0]))
    with pytest.raises(ValueError, match="labels have other values"):
        Metrics().update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.5]))
    with pytest.raises(ValueError, match="2 logits for 3 labels"):
        Metrics().update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0]))


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch):
    """Replace the transfer from a GPU, which is not there."""
    monkeypatch.setattr("skirl.train.metrics.sent", lambda *tensors: lambda: tensors)


class OnGpu:
    """A loss that records when its value is asked for."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, value, asked):
        self.value, self.asked = value, asked

    def item(self):
        self.asked.append(self.value)
        return self.value


LOSSES = [0.5, 0.25, 1.5, 0.125]
LOGITS = [torch.tensor([1.0, -2.0]) * i for i in range(1, 5)]
LABELS = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])]


def test_a_step_on_a_gpu_is_counted_with_the_one_after_it():
    asked, meter = [], Meter()
    for loss, logits, labels in zip(LOSSES, LOGITS, LABELS):
        before = len(asked)
        meter.add(OnGpu(loss, asked), logits, labels)
        assert len(asked) - before == (1 if loss != LOSSES[0] else 0)
    assert asked == LOSSES[:3]
    assert meter.so_far["sum"] == sum(LOSSES) and asked == LOSSES


def test_who_asks_is_told_of_every_step():
    here, there = Meter(), Meter()
    for loss, logits, labels in zip(LOSSES, LOGITS, LABELS):
        here.add(torch.tensor(loss), logits, labels)
        there.add(OnGpu(loss, []), logits, labels)
        assert there.steps == here.steps and there.metrics.scores() == here.metrics.scores()
    there.add(OnGpu(9.0, []), LOGITS[0], LABELS[0])
    here.add(torch.tensor(9.0), LOGITS[0], LABELS[0])
    ours, expected = there.state_dict(), here.state_dict()
    assert ours["so_far"] == expected["so_far"] and there.metrics.scores() == here.metrics.scores()


def test_a_checkpoint_takes_the_place_of_what_was_not_counted_yet():
    saved, meter = Meter(), Meter()
    saved.add(torch.tensor(0.5), LOGITS[0], LABELS[0])
    meter.add(OnGpu(9.0, []), LOGITS[1], LABELS[1])
    meter.load_state_dict(saved.state_dict())
    assert (meter.steps, meter.so_far["sum"]) == (1, 0.5)


def test_predictions_of_another_trainer_that_are_not_finite():
    """This trainer has no logits, and as many samples as the step."""
    none, meter = torch.empty(0), Meter()
    meter.add(torch.tensor(0.5), none, none, samples=8)
    assert meter.so_far["samples"] == 8 and not meter.diverged(last=True) and meter.result()["auc"] is None
    meter.add(torch.tensor(0.5), none, none, samples=8, finite=False)
    assert meter.diverged(last=True) and meter.not_finite == (2, "predictions are not finite")
