"""The meter: its counts are the same wherever the numbers come from, and it waits for a GPU as late as possible."""

from types import SimpleNamespace

import pytest
import torch

from skirl.train.metrics import Meter


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
    assert meter.losses == sum(LOSSES) and asked == LOSSES


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
    assert (meter.steps, meter.losses) == (1, 0.5)


def test_predictions_of_another_trainer_that_are_not_finite():
    """This trainer has no logits, and as many samples as the step."""
    none, meter = torch.empty(0), Meter()
    meter.add(torch.tensor(0.5), none, none, samples=8)
    assert meter.samples == 8 and not meter.diverged(last=True) and meter.result()["auc"] is None
    meter.add(torch.tensor(0.5), none, none, samples=8, finite=False)
    assert meter.diverged(last=True) and meter.not_finite == (2, "predictions are not finite")
