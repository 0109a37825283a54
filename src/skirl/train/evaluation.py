"""Evaluation on held-out samples during training: when to evaluate, the scores, and when to stop early."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from skirl.core.batch import Batch
from skirl.tools import rng_state
from skirl.train.metrics import Metrics, Scores

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
    """The evaluations of a run, which are part of its checkpoint.

    every: steps between two evaluations; patience: how many without a better one stop the run.
    """

    def __init__(self, *, every: int | None = None, patience: int | None = None) -> None:
        self.every = every
        self.patience = patience
        self.step = 0  # of the last evaluation
        self.scores: Scores | None = None
        self.best: float | None = None  # the least log loss
        self.best_step = 0
        self.since = 0  # evaluations since the best one
        self.seconds = 0.0  # of all evaluations in this process
        self.last_seconds = 0.0

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
        self.step, self.scores = step, scores
        self.seconds, self.last_seconds = self.seconds + seconds, seconds
        loss = math.inf if scores.logloss is None or math.isnan(scores.logloss) else scores.logloss
        if self.best is None or loss < self.best:
            self.best, self.best_step, self.since = loss, step, 0
        else:
            self.since += 1

    def result(self) -> dict[str, Any]:
        """The last evaluation's entries for the result of a run."""
        if self.scores is None:
            return {}
        return {f"test_{name}": value for name, value in asdict(self.scores).items()}

    def state_dict(self) -> dict[str, Any]:
        scores = None if self.scores is None else asdict(self.scores)
        named = {name: getattr(self, name) for name in ("step", "best", "best_step", "since")}
        return {**named, "scores": scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best, self.best_step = state["step"], state["best"], state["best_step"]
        self.since = state["since"]
        self.scores = None if state["scores"] is None else Scores(**state["scores"])
