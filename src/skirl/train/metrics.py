"""Metrics over a stream of any length, from logits; and the meter of a run: loss, metrics and speed so far."""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.tools.progress import Speed

_BITS = 18
TOGETHER = 65536
"""Samples to bin at once; binning costs 1 ms whether for one or for thousands."""
Values = Tensor | np.ndarray


class NotFinite(ValueError):
    """Of predictions."""


@dataclass(frozen=True)
class Scores:
    """The quality of predictions. A score that needs both clicks and non-clicks is None if one kind is missing."""

    samples: int
    auc: float | None
    """How often a click scores above a non-click, ties counting one half."""
    logloss: float | None
    """Mean binary cross-entropy in nats."""
    ne: float | None
    """Normalised entropy: the log loss relative to that of always predicting the click rate."""
    calibration: float | None
    """Predicted clicks per real click."""


class Metrics:
    """All metrics of one stream of predictions."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, 1 << _BITS), np.int64)  # non-clicks and clicks by the leading bits of their score
        self._sums: dict[str, Any] = {"samples": 0, "clicks": 0, "loss": 0.0, "predicted": 0.0}
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._scored: Scores | None = None  # cached, because scores take a millisecond

    def update(self, logits: Values, labels: Values) -> None:
        """Add a batch. Raise if it would silently corrupt a metric."""
        x, clicks = (_flat(values) for values in (logits, labels))
        if x.size != clicks.size:
            raise ValueError(f"{x.size} logits for {clicks.size} labels: pass one label for each logit")
        if not np.isfinite(x).all():
            raise NotFinite(
                f"{np.count_nonzero(~np.isfinite(x))} of {x.size} logits are not finite: has training diverged?"
            )
        if not ((clicks == 0) | (clicks == 1)).all():
            raise ValueError("labels have other values than 0 and 1: set each to one of the two")
        tail, sums = np.exp(-np.abs(x)), self._sums  # the exponential never overflows
        sums["loss"] += float(np.sum(np.maximum(x, 0) - x * clicks + np.log1p(tail)))
        sums["predicted"] += float(np.sum(np.where(x >= 0, 1.0, tail) / (1 + tail)))
        sums["samples"] += x.size
        sums["clicks"] += int(clicks.sum())
        self._waiting.append((x.astype(np.float32), clicks))
        if len(self._waiting) * x.size >= TOGETHER:
            self._bin()

    def scores(self) -> Scores:
        """Of all samples so far."""
        samples, clicks, loss, predicted = self._sums.values()
        if self._scored is None or self._scored.samples != samples:
            self._bin()
            others, clicked = self._counts.astype(np.float64)
            below = np.cumsum(others) - others
            auc = _ratio(float(np.sum(clicked * (below + others / 2))), float(clicked.sum() * others.sum()))
            mean, rate = _ratio(loss, samples), clicks / max(1, samples)
            constant = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0
            ne = None if mean is None else _ratio(mean, constant)
            self._scored = Scores(samples, auc, mean, ne, _ratio(predicted, clicks))
        return self._scored

    def state_dict(self) -> dict[str, Any]:
        self._bin()
        return {"counts": torch.from_numpy(self._counts.copy()), **self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._scored = None
        self._counts[:] = state["counts"].numpy()
        self._sums = {name: state[name] for name in self._sums}

    def _bin(self) -> None:
        if not self._waiting:
            return
        scores, clicks = (np.concatenate(parts) for parts in zip(*self._waiting))
        self._waiting.clear()
        bits = (scores + np.float32(0)).view(np.int32)  # + 0 turns -0 into +0
        # Floats order like their bits, negative ones in reverse: invert those, then shift all above zero.
        ordered = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
        bins = (ordered >> np.uint32(32 - _BITS)).astype(np.int64)
        for clicked in (0, 1):
            self._counts[clicked] += np.bincount(bins[clicks == clicked], minlength=1 << _BITS)


def _flat(values: Values) -> np.ndarray:
    array = values.detach().double().cpu().numpy() if isinstance(values, Tensor) else values
    return np.asarray(array, np.float64).reshape(-1)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class Meter:
    """Measures a run. All but the speed is part of its checkpoint."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._late: deque[tuple[Callable[[], tuple[Tensor, ...]], int, bool]] = deque()
        self._counted: dict[str, Any] = {"steps": 0, "samples": 0, "first": nan, "last": nan, "sum": 0.0, "digest": ""}
        self.not_finite: tuple[int, str] | None = None
        """The first step whose loss or predictions were not finite, and what was. Nothing from there on is counted."""
        self.speed = Speed()

    def add(
        self, loss: Tensor, logits: Tensor, labels: Tensor, *, samples: int | None = None, finite: bool = True
    ) -> None:
        """Add a step.

        samples: those of the step, by default as many as labels. finite: whether other trainers' logits are finite.
        """
        self._late.append((sent(loss, logits, labels), len(labels) if samples is None else samples, finite))
        while len(self._late) > (loss.device.type != "cpu"):
            self._count(*self._late.popleft())

    @property
    def metrics(self) -> Metrics:
        """Metrics of all predictions, each made before its batch was trained on."""
        _ = self._so_far
        return self._metrics

    @property
    def _so_far(self) -> dict[str, Any]:
        """The counts over all steps, including those whose loss was still on its way."""
        while self._late:
            self._count(*self._late.popleft())
        return self._counted

    def _count(self, landed: Callable[[], tuple[Tensor, ...]], samples: int, finite: bool) -> None:
        on_host, logits, labels = landed()
        here, loss = self._counted, float(on_host.item())
        if self.not_finite is None and not (isfinite(loss) and finite and bool(torch.isfinite(logits).all())):
            what = "predictions are not finite" if isfinite(loss) else f"the loss is {loss}"
            self.not_finite = here["steps"] + 1, what
        if self.not_finite is not None:  # what follows is meaningless and would make all sums nan
            return
        here["first"] = here["first"] if here["steps"] else loss
        here["last"] = loss
        here["sum"] += loss
        here["digest"] = hashlib.blake2b(f"{here['digest']} {loss.hex()}".encode(), digest_size=16).hexdigest()
        here["steps"] += 1
        here["samples"] += samples
        self.speed.reached(here["samples"])
        if len(labels):
            self._metrics.update(logits, labels)

    @property
    def steps(self) -> int:
        return self._so_far["steps"]

    @property
    def samples(self) -> int:
        return self._so_far["samples"]

    @property
    def losses(self) -> float:
        return self._so_far["sum"]

    @property
    def seconds(self) -> float:
        """Seconds since the start in this process, without pauses."""
        return self.speed.seconds

    def diverged(self, *, last: bool) -> bool:
        """Whether a loss or prediction was not finite. A GPU's step is known one step later. last: wait for all."""
        if last:
            _ = self._so_far
        return self.not_finite is not None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics.state_dict(), "so_far": dict(self._so_far)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._late.clear()
        self._metrics.load_state_dict(state["metrics"])
        self._so_far.update(state["so_far"])

    def result(self) -> dict[str, Any]:
        here = self._so_far
        return {
            "samples": here["samples"], "seconds": self.seconds, "samples_per_second": self.speed.rate(here["samples"]),
            "loss": {
                "first": here["first"], "last": here["last"], "mean": here["sum"] / max(1, here["steps"]),
                "digest": here["digest"],
            },
            **{name: value for name, value in asdict(self.metrics.scores()).items() if name != "samples"},
        }  # fmt: skip


def sent(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Start copying tensors to the host. Return a call that waits for them, but not for later work of the GPU.

    >>> sent(torch.tensor(0.5), torch.tensor([1]))()
    (tensor(0.5000), tensor([1]))
    """
    at = tensors[0].device
    if at.type != "cuda":
        return lambda: tensors
    here = tuple(tensor.detach().to("cpu", non_blocking=True) for tensor in tensors)  # to pinned memory
    there = torch.cuda.Event(blocking=True)  # sleep while waiting
    there.record(torch.cuda.current_stream(at))

    def landed() -> tuple[Tensor, ...]:
        there.synchronize()
        return here

    return landed
