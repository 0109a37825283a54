"""Loss, metrics and speed of a run so far, for its progress and its result."""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from skirl.pipeline.lookahead import Lookahead
from skirl.tools.progress import Facts, Speed
from skirl.tools.units import figure
from skirl.train.metrics import Metrics


class Meter:
    """Measures a run. All but the speed is part of its checkpoint.

    >>> import torch
    >>> meter = Meter()
    >>> meter.add(torch.tensor(0.5), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))
    >>> meter.result()["auc"], meter.result()["loss"]["mean"]
    (1.0, 0.5)
    """

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._late: deque[tuple[Callable[[], tuple[Tensor, ...]], int, bool]] = deque()
        self._counted: dict[str, Any] = {"steps": 0, "samples": 0, "first": nan, "last": nan, "sum": 0.0, "digest": ""}
        self.not_finite: tuple[int, str] | None = None
        """The first step whose loss or predictions were not finite, and what was. Nothing from there on is counted."""
        self.speed = Speed()
        """The seconds spent on training."""
        self._shown = (0.0, 0, 0, 0.0)

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
        """Return whether a loss or prediction was not finite. A GPU's step is known one step later. last: wait for all."""
        if last:
            _ = self._so_far
        return self.not_finite is not None

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self.metrics.state_dict(), "so_far": dict(self._so_far)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._late.clear()
        self._metrics.load_state_dict(state["metrics"])
        self._so_far.update(state["so_far"])
        self._shown = (self.speed.seconds, self._so_far["steps"], self._so_far["samples"], self._so_far["sum"])

    def facts(self, batches: Lookahead) -> Facts:
        """Return facts for the progress: speed and loss since the last call, all others since the start."""
        now, engine, here = self.speed.seconds, batches.engine, self._so_far
        since, steps, samples, losses = self._shown
        self._shown = (now, here["steps"], here["samples"], here["sum"])
        moved, scores = engine.counters, self.metrics.scores()
        filled = sum(cache.filled for cache in engine.caches) / max(1, sum(len(cache) for cache in engine.caches))
        return {
            "samples/s": f"{(here['samples'] - samples) / max(now - since, 1e-9):,.0f}",
            "loss": figure((here["sum"] - losses) / max(1, here["steps"] - steps)),
            "AUC": _shown(scores.auc),
            "NE": _shown(scores.ne),
            "fetched": f"{moved.fetched:,}",
            "new": f"{moved.new:,}",
            "written": f"{moved.written:,}",
            "cache": f"{filled:.0%} full",
            "hidden": f"{batches.times.hidden:.0%}" if moved.fetched or moved.written else "nothing moved",
            "window": f"{batches.window} batches",
        }

    def result(self) -> dict[str, Any]:
        here = self._so_far
        return {
            "samples": here["samples"],
            "seconds": self.seconds,
            "samples_per_second": self.speed.rate(here["samples"]),
            "loss": {
                "first": here["first"],
                "last": here["last"],
                "mean": here["sum"] / max(1, here["steps"]),
                "digest": here["digest"],
            },
            **{name: value for name, value in asdict(self.metrics.scores()).items() if name != "samples"},
        }


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


def _shown(value: float | None) -> str:
    return "none yet" if value is None else figure(value)
