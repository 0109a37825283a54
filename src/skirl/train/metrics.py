"""Metrics over a stream of any length, from logits; evaluations on samples held out; and the meter of a run."""

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.tools import rng_state
from skirl.tools.progress import Facts, Speed
from skirl.tools.units import figure

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
    def __init__(self) -> None:
        self._counts = np.zeros((2, 1 << _BITS), np.int64)  # non-clicks and clicks by the leading bits of their score
        self._sums: dict[str, Any] = {"samples": 0, "clicks": 0, "loss": 0.0, "predicted": 0.0}
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []

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
        self._waiting.append((x, clicks))
        if len(self._waiting) * x.size >= TOGETHER:
            self._bin()

    def scores(self) -> Scores:
        self._bin()
        samples, clicks, loss, predicted = self._sums.values()
        others, clicked = self._counts.astype(np.float64)
        below = np.cumsum(others) - others
        auc = _ratio(float(np.sum(clicked * (below + others / 2))), float(clicked.sum() * others.sum()))
        mean, rate = _ratio(loss, samples), clicks / max(1, samples)
        constant = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0
        ne = None if mean is None else _ratio(mean, constant)
        return Scores(samples, auc, mean, ne, _ratio(predicted, clicks))

    def state_dict(self) -> dict[str, Any]:
        self._bin()
        return {"counts": torch.from_numpy(self._counts.copy()), **self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._waiting.clear()
        self._counts[:] = state["counts"].numpy()
        self._sums = {name: state[name] for name in self._sums}

    def _bin(self) -> None:
        if not self._waiting:
            return
        x, clicks = (np.concatenate(parts) for parts in zip(*self._waiting))
        ends = np.cumsum([len(part) for part, _ in self._waiting])[:-1]
        self._waiting.clear()
        tail, sums = np.exp(-np.abs(x)), self._sums  # the exponential never overflows
        for name, each in (
            ("loss", np.maximum(x, 0) - x * clicks + np.log1p(tail)),
            ("predicted", np.where(x >= 0, 1.0, tail) / (1 + tail)),
        ):
            for part in np.split(each, ends):  # batch by batch, so that sums do not depend on how many wait
                sums[name] += float(np.sum(part))
        sums["samples"] += x.size
        sums["clicks"] += int(clicks.sum())
        bits = (x.astype(np.float32) + np.float32(0)).view(np.int32)  # + 0 turns -0 into +0
        # Floats order like their bits, negative ones in reverse: invert those, then shift all above zero.
        ordered = np.where(bits < 0, ~bits, bits | np.int32(-(2**31))).view(np.uint32)
        bins = (ordered >> np.uint32(32 - _BITS)).astype(np.int64)
        for clicked in (0, 1):
            self._counts[clicked] += np.bincount(bins[clicks == clicked], minlength=1 << _BITS)


def _flat(values: Values) -> np.ndarray:
    """Return a copy, which waits to be binned."""
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64, copy=True).numpy().reshape(-1)
    return np.array(values, np.float64).reshape(-1)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


Exchange = Callable[[list[np.ndarray]], Sequence[Sequence[np.ndarray]]]
"""Sends arrays to all trainers and returns each trainer's, in order of rank."""


def evaluate(model: nn.Module, batches: Iterable[Batch], *, exchange: Exchange | None = None) -> Scores:
    """Score a model on these batches, without changing it. Several trainers share the work and get the scores of one."""
    metrics = Metrics()
    with evaluating(model, batches) as found:
        for batch in found:  # lookups need all trainers, so those without a batch in a turn predict an empty one
            with torch.no_grad():
                logits = model(batch)
            pairs: Sequence[Sequence[Any]] = [(logits, batch.labels)]
            if exchange is not None:
                pairs = exchange([logits.float().cpu().numpy().reshape(-1), batch.labels.cpu().numpy().reshape(-1)])
            for each, labels in pairs:
                if len(labels):
                    metrics.update(each, labels)
    return metrics.scores()


@contextmanager
def evaluating(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Put the model in eval mode in this block, and provide the same batches."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with rng_state.unchanged():  # a DataLoader draws its order
            yield iter(batches)
    finally:
        for module, training in modes:
            module.training = training


class Evaluation:
    """The evaluations of a run, which are part of its checkpoint. patience: how many without a better one stop it."""

    def __init__(self, *, every: int | None = None, patience: int | None = None) -> None:
        self.every = every
        self.patience = patience
        self.step = 0  # of the last evaluation
        self.scores: Scores | None = None
        self.best: float | None = None  # the least log loss
        self.best_step = 0
        self.since = 0  # evaluations since the best one
        self.seconds = 0.0  # of the last one

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to evaluate after this step, but never twice after the same one."""
        return step > self.step and (last or (self.every is not None and step % self.every == 0))

    @property
    def stops(self) -> bool:
        """Whether the last `patience` evaluations were no better than the best."""
        return self.patience is not None and self.since >= self.patience

    def run(self, step: int, model: nn.Module, batches: Iterable[Batch], *, exchange: Exchange | None = None) -> Scores:
        started = time.monotonic()
        scores = evaluate(model, batches, exchange=exchange)
        self.add(step, scores, time.monotonic() - started)
        return scores

    def add(self, step: int, scores: Scores, seconds: float) -> None:
        self.step, self.scores, self.seconds = step, scores, seconds
        loss = math.inf if scores.logloss is None or math.isnan(scores.logloss) else scores.logloss
        if self.best is None or loss < self.best:
            self.best, self.best_step, self.since = loss, step, 0
        else:
            self.since += 1

    def result(self) -> dict[str, Any]:
        if self.scores is None:
            return {}
        best = None if self.best is None or math.isinf(self.best) else self.best
        scores = {f"test_{name}": value for name, value in asdict(self.scores).items()}
        return scores | {"test_step": self.step, "best_step": self.best_step, "best_logloss": best}

    def facts(self) -> Facts:
        assert self.scores is not None
        named = {"test log loss": self.scores.logloss, "AUC": self.scores.auc}
        shown = {name: figure(value) for name, value in named.items() if value is not None}
        earlier = f"{figure(self.best or nan)} at step {self.best_step:,}"
        return shown | {"best": "this one" if self.best_step == self.step else earlier}

    def state_dict(self) -> dict[str, Any]:
        scores = None if self.scores is None else asdict(self.scores)
        named = {name: getattr(self, name) for name in ("step", "best", "best_step", "since")}
        return {**named, "scores": scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.since = state["since"]
        self.scores = None if state["scores"] is None else Scores(**state["scores"])


class Meter:
    """Measures a run. All but the speed is part of its checkpoint."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._late: deque[tuple[Callable[[], tuple[Tensor, ...]], int, bool]] = deque()
        self._counted: dict[str, Any] = {"steps": 0, "samples": 0, "first": nan, "last": nan, "sum": 0.0, "digest": ""}
        self.not_finite: tuple[int, str] | None = None
        """The first step whose loss or predictions were not finite, and what was. Nothing from there on is counted."""
        self.speed = Speed()  # in this process, without pauses

    def add(
        self, loss: Tensor, logits: Tensor, labels: Tensor, *, samples: int | None = None, finite: bool = True
    ) -> None:
        """Add a step. samples: by default as many as labels. finite: whether other trainers' logits are finite."""
        self._late.append((sent(loss, logits, labels), len(labels) if samples is None else samples, finite))
        while len(self._late) > (loss.device.type != "cpu"):
            self._count(*self._late.popleft())

    @property
    def metrics(self) -> Metrics:
        """Metrics of all predictions, each made before its batch was trained on."""
        _ = self.so_far
        return self._metrics

    @property
    def so_far(self) -> dict[str, Any]:
        """The counts over all steps, including those whose loss was still on its way."""
        while self._late:
            self._count(*self._late.popleft())
        return self._counted

    def _count(self, landed: Callable[[], tuple[Tensor, ...]], samples: int, finite: bool) -> None:
        on_host, logits, labels = landed()
        here, loss = self._counted, float(on_host.item())
        if self.not_finite is not None:  # what follows is meaningless and would make all sums nan
            return
        try:
            if not (isfinite(loss) and finite):
                raise NotFinite
            if len(labels):
                self._metrics.update(logits, labels)
        except NotFinite:
            what = "predictions are not finite" if isfinite(loss) else f"the loss is {loss}"
            self.not_finite = here["steps"] + 1, what
            return
        here["first"] = here["first"] if here["steps"] else loss
        here["last"] = loss
        here["sum"] += loss
        here["digest"] = hashlib.blake2b(f"{here['digest']} {loss.hex()}".encode(), digest_size=16).hexdigest()
        here["steps"] += 1
        here["samples"] += samples
        self.speed.reached(here["samples"])

    @property
    def steps(self) -> int:
        return self.so_far["steps"]

    def diverged(self, *, last: bool) -> bool:
        """Whether a loss or prediction was not finite. A GPU's step is known one step later. last: wait for all."""
        if last:
            _ = self.so_far
        return self.not_finite is not None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics.state_dict(), "so_far": dict(self.so_far)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._late.clear()
        self._metrics.load_state_dict(state["metrics"])
        self.so_far.update(state["so_far"])

    def result(self) -> dict[str, Any]:
        here = self.so_far
        return {
            "samples": here["samples"], "seconds": self.speed.seconds,
            "samples_per_second": self.speed.rate(here["samples"]),
            "loss": {
                "first": here["first"], "last": here["last"], "mean": here["sum"] / max(1, here["steps"]),
                "digest": here["digest"],
            },
            **{name: value for name, value in asdict(self.metrics.scores()).items() if name != "samples"},
        }  # fmt: skip


def sent(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Start copying tensors to the host. Return a call that waits for them, but not for later work of the GPU."""
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
