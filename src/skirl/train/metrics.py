"""Metrics over a stream of any length: AUC, log loss, normalised entropy and calibration, from logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_BITS = 18
TOGETHER = 65536
"""Samples to bin at once; binning costs 1 ms whether for one or for thousands."""
Values = torch.Tensor | np.ndarray


class NotFinite(ValueError):
    """Predictions are not finite."""


@dataclass(frozen=True)
class Scores:
    """The quality of predictions. A score that needs both clicks and non-clicks is None if one kind is missing."""

    samples: int
    auc: float | None
    logloss: float | None
    ne: float | None
    """Normalised entropy: the log loss relative to that of always predicting the click rate."""
    calibration: float | None
    """Predicted clicks per real click."""


class Metrics:
    """All metrics of one stream of predictions.

    >>> metrics = Metrics()
    >>> metrics.update(np.array([0.0, 0.0]), np.array([0, 1]))
    >>> metrics.scores()
    Scores(samples=2, auc=0.5, logloss=0.6931471805599453, ne=1.0, calibration=1.0)
    """

    def __init__(self) -> None:
        self.auc = StreamingAUC()
        self.loss = LogLoss()
        self._waiting: list[tuple[Values, Values]] = []
        self._scored: Scores | None = None
        """The last scores, cached because they take a millisecond."""

    def update(self, logits: Values, labels: Values) -> None:
        self.loss.update(logits, labels)
        self._waiting.append((logits, labels))
        if len(self._waiting) * len(labels) >= TOGETHER:
            self._settle()

    def scores(self) -> Scores:
        loss = self.loss
        if self._scored is None or self._scored.samples != loss.samples:
            self._settle()
            values = (self.auc.value(), loss.value(), loss.normalised_entropy(), loss.calibration())
            self._scored = Scores(loss.samples, *(None if math.isnan(value) else value for value in values))
        return self._scored

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return {"auc": self.auc.state_dict(), "loss": self.loss.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._scored = None
        self.auc.load_state_dict(state["auc"])
        self.loss.load_state_dict(state["loss"])

    def _settle(self) -> None:
        self.auc.update_all(self._waiting)
        self._waiting.clear()


class StreamingAUC:
    """The area under the ROC curve: how often a click scores above a non-click, ties counting one half.

    >>> auc = StreamingAUC()
    >>> auc.update(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    >>> auc.value()
    0.75
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, 1 << _BITS), np.int64)  # non-clicks, clicks

    def update(self, logits: Values, labels: Values) -> None:
        """Add a batch. Any score that increases with the click's probability will do."""
        bins, clicks = _bins_of(logits, labels)
        for clicked in (0, 1):
            self._counts[clicked] += np.bincount(bins[clicks == clicked], minlength=1 << _BITS)

    def update_all(self, batches: Sequence[tuple[Values, Values]]) -> None:
        if batches:
            logits, labels = (np.concatenate([_flat(part) for part in parts]) for parts in zip(*batches))
            self.update(logits, labels)

    def value(self) -> float:
        """Return the AUC of all samples so far; nan until there are both clicks and non-clicks."""
        others, clicks = self._counts.astype(np.float64)
        below = np.cumsum(others) - others
        return _ratio(float(np.sum(clicks * (below + others / 2))), float(clicks.sum() * others.sum()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"counts": torch.from_numpy(self._counts.copy())}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._counts[:] = state["counts"].numpy()


class LogLoss:
    """Mean binary cross-entropy in nats, and the metrics that come from the same sums.

    >>> loss = LogLoss()
    >>> loss.update(np.array([0.0, 0.0]), np.array([0, 1]))
    >>> round(loss.value(), 4), loss.normalised_entropy(), loss.calibration()
    (0.6931, 1.0, 1.0)
    """

    def __init__(self) -> None:
        self._samples = self._clicks = 0
        self._loss = self._predicted = 0.0

    def update(self, logits: Values, labels: Values) -> None:
        x, clicks = _checked(logits, labels)
        tail = np.exp(-np.abs(x))  # never overflows
        self._loss += float(np.sum(np.maximum(x, 0) - x * clicks + np.log1p(tail)))
        self._predicted += float(np.sum(np.where(x >= 0, 1.0, tail) / (1 + tail)))
        self._samples += x.size
        self._clicks += int(clicks.sum())

    def value(self) -> float:
        """Return the mean over all samples so far; nan before the first."""
        return _ratio(self._loss, self._samples)

    @property
    def samples(self) -> int:
        return self._samples

    def click_rate(self) -> float:
        return _ratio(self._clicks, self._samples)

    def calibration(self) -> float:
        """Return predicted clicks per real click: 1 is right."""
        return _ratio(self._predicted, self._clicks)

    def normalised_entropy(self) -> float:
        """Return the loss relative to that of always predicting the click rate: below 1 is better."""
        p = self.click_rate()
        if not 0 < p < 1:
            return math.nan
        return self.value() / -(p * math.log(p) + (1 - p) * math.log(1 - p))

    def state_dict(self) -> dict[str, int | float]:
        return {
            "samples": self._samples,
            "clicks": self._clicks,
            "loss": self._loss,
            "predicted": self._predicted,
        }

    def load_state_dict(self, state: dict[str, int | float]) -> None:
        self._samples, self._clicks = int(state["samples"]), int(state["clicks"])
        self._loss, self._predicted = float(state["loss"]), float(state["predicted"])


def _bins_of(logits: Values, labels: Values) -> tuple[np.ndarray, np.ndarray]:
    scores, clicks = _checked(logits, labels)
    bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32)  # + 0 turns -0 into +0
    # Floats order like their bits, negative ones in reverse: invert those, then shift all above zero.
    ordered = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
    return (ordered >> np.uint32(32 - _BITS)).astype(np.int64), clicks


def _checked(logits: Values, labels: Values) -> tuple[np.ndarray, np.ndarray]:
    """Return both as flat float64 arrays. Raise if they would silently corrupt a metric."""
    x, y = (_flat(values) for values in (logits, labels))
    if x.size != y.size:
        raise ValueError(f"{x.size} logits for {y.size} labels: pass one label for each logit")
    if not np.isfinite(x).all():
        raise NotFinite(
            f"{np.count_nonzero(~np.isfinite(x))} of {x.size} logits are not finite: has training diverged?"
        )
    if not ((y == 0) | (y == 1)).all():
        raise ValueError("labels have other values than 0 and 1: set each to one of the two")
    return x, y


def _flat(values: Values) -> np.ndarray:
    array = values.detach().double().cpu().numpy() if isinstance(values, torch.Tensor) else values
    return np.asarray(array, np.float64).reshape(-1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
