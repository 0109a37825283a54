"""Evaluations of all variants on the held-out samples, which are read once for all, and what follows for each."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import tee
from math import isfinite
from typing import Any, Self

from skirl.core.batch import Batch
from skirl.sweep.entrant import Entrant
from skirl.tools import rng_state
from skirl.train.evaluation import Evaluation, Fresh

BROKEN = "predictions for the samples held out are not finite"
"""The reason that is given for a variant whose predictions diverge."""


@dataclass(frozen=True)
class Judged:
    """The outcome of a variant's evaluations so far.

    >>> at = Judged(step=40, best=0.5, best_step=20, since=2)
    >>> at.is_best, at.stops(3), at.stops(2), at.stops(None)
    (False, False, True, False)
    """

    step: int
    """The step of the last evaluation."""
    best: float | None
    """The lowest log loss; None if none was finite."""
    best_step: int
    """The step with the lowest log loss."""
    since: int
    """Number of evaluations since then."""

    @classmethod
    def of(cls, judge: Evaluation) -> Self:
        """Return the outcome after one more evaluation."""
        best = judge.best if judge.best is not None and isfinite(judge.best) else None
        return cls(judge.step, best, judge.best_step, judge.since)

    @property
    def is_best(self) -> bool:
        """True if the last evaluation is the best."""
        return self.best is not None and self.best_step == self.step

    def stops(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations were no better than the best, so that the variant stops."""
        return patience is not None and self.since >= patience


def why_stopped(patience: int | None, step: int) -> str:
    """Say why a variant that has stopped leaves.

    >>> why_stopped(1, 1000), why_stopped(3, 40)
    ('no better in 1 evaluation at step 1,000', 'no better in 3 evaluations at step 40')
    """
    return f"no better in {patience} evaluation{'s' * (patience != 1)} at step {step:,}"


def best_of(name: str | None, judged: Mapping[str, Judged], folders: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the evaluation with the least log loss of a variant; None if it had none.

    **Arguments**

    - `name`: the variant; None if there is no winner.
    - `judged`: the outcome of every variant that was evaluated.
    - `folders`: where each variant's best checkpoint is kept.

    >>> best_of("b", {"a": Judged(9, 0.5, 9, 0), "b": Judged(9, 0.4, 6, 1)}, {})
    {'variant': 'b', 'step': 6, 'test_logloss': 0.4, 'folder': None}
    """
    if name is None or name not in judged or judged[name].best is None:
        return None
    kept, step = folders.get(name), judged[name].best_step
    folder = kept["folder"] if kept is not None and kept["step"] == step else None
    return {"variant": name, "step": step, "test_logloss": judged[name].best, "folder": folder}


def evaluate(entrants: Sequence[Entrant], step: int, held_out: Iterable[Batch]) -> dict[str, Judged | None]:
    """Predict the held-out samples with all variants, reading each batch once. Return the scores by name.

    A variant whose predictions are not finite has None.

    **Arguments**

    - `entrants`: those still in training.
    - `step`: the step after which this happens.
    - `held_out`: the held-out batches.
    """
    with rng_state.unchanged(), ExitStack() as stack:
        for entrant in entrants:
            stack.enter_context(entrant.meter.speed.paused())
        copies = tee(held_out, len(entrants))  # they advance together, so no batch is kept for long
        going = [entrant.evaluation(step, Fresh(copy)) for entrant, copy in zip(entrants, copies, strict=True)]
        del copies
        while going:
            going = [one for one in going if next(one, going) is None]
    return {e.variant.name: Judged.of(e.judge) if e.judge.step == step else None for e in entrants}
