"""A variant of a recipe while it is trained: its losses, metrics, learning rates and folder."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import tee
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.variants import Varied
from skirl.tools import rng_state
from skirl.train.commands import Train
from skirl.train.evaluation import Evaluation, predicted
from skirl.train.flags import LogFlags
from skirl.train.meter import Meter
from skirl.train.metrics import Metrics, NotFinite
from skirl.train.report.run_folder import RunFolder
from skirl.train.schedule import Rates
from skirl.train.scored import Fresh


def loss_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss that `skirl train` uses, and the logits."""
    logits = model(batch)
    return binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype)), logits.detach()


class Entrant:
    """A variant in training, with the metrics and the folder of its run.

    **Arguments**

    - `variant`: the variant, with its recipe.
    - `contender`: the same variant in the sweep.
    - `rates`: its learning rates.
    - `lists`: features with any number of ids per sample.
    - `folder`: the folder of its run, or "none".
    - `every`: steps between two lines of metrics.
    - `resume`: whether it resumes from a checkpoint.
    - `table`: by variant, the flags in which variants differ.
    """

    def __init__(
        self,
        variant: Varied,
        contender: Contender,
        rates: Rates,
        *,
        lists: Sequence[str],
        folder: str,
        every: int,
        resume: bool = False,
        table: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.variant, self.contender, self.rates = variant, contender, rates
        self.meter = Meter(lists)
        self.judge = Evaluation()
        self.flags = Train(recipe=variant.recipe, log=LogFlags(run=folder, log_every=every)).flat()
        self.run = RunFolder(folder, name=variant.name, flags=self.flags, every=every, resume=resume, table=table)
        self.auc: float | None = None
        """AUC over all its predictions, once it is done."""
        self.done = False
        """True once its training is over and everything is written down."""
        self._written = 0
        """Last step covered by a line of metrics."""

    @property
    def parts(self) -> list[Any]:
        """What a checkpoint saves besides its model, as `skirl train` does."""
        return [self.contender.dense, self.rates, self.meter, self.judge, self.run]

    @property
    def loss(self) -> float:
        """The loss of the last batch; nan if there is none."""
        return nan if self.contender.loss is None else self.contender.loss

    def step(self, batch: Batch) -> None:
        """Update rates and metrics after training on a batch.

        **Arguments**

        - `batch`: the batch that it was trained on.
        """
        self.rates.step()
        # Predictions of a variant that has diverged and left do not count.
        logits = self.contender.kept if self.contender.left is None else torch.empty(0)
        self.meter.add(torch.tensor(self.loss), logits, batch.labels)

    def evaluation(self, step: int, held_out: Iterable[Batch]) -> Iterator[None]:
        """Predict the held-out samples, one batch per `next`, and record their scores at the end.

        **Arguments**

        - `step`: the step after which this happens.
        - `held_out`: the held-out batches.
        """
        metrics, began = Metrics(), time.monotonic()
        with suppress(NotFinite), closing(predicted(self.contender.model, held_out)) as found:  # no scores then
            for batch, logits in found:
                metrics.update(logits, batch.labels)
                yield
            self.judge.add(step, metrics.scores(), time.monotonic() - began)

    def after_step(self, batches: Lookahead, *, last: bool = False) -> None:
        """Write the line of metrics if it is due, or if this is the last step."""
        if last and self._written == self.meter.steps:
            return
        self._written = self.meter.steps if last or batches.step % self.run.every == 0 else self._written
        self.run.after_step(batches, self.meter, self.rates.now, last=last, evaluation=self.judge)

    def end(self, auc: float | None) -> None:
        """Mark it as done and drop its learning rates, which hold its optimizers and thus its weights.

        **Arguments**

        - `auc`: the AUC over all its predictions.
        """
        self.auc, self.done = auc, True
        del self.rates

    def finish(self, batches: Lookahead, left: str | None) -> dict[str, Any]:
        """Close its run, write its result and return it.

        **Arguments**

        - `batches`: the lookahead of the sweep.
        - `left`: why it left; None if it was trained to the end.
        """
        self.after_step(batches, last=True)
        self.run.__exit__(None, None, None)
        result = {
            "command": "train",
            **self.flags,
            **self.meter.result(),
            **self.judge.result(),
            "steps": self.meter.steps,
            "begun_at": self.run.begun_at,
            "left": left,
            "run": self.run.path,
            "checkpoints": {"stopped_by": None},
            "failed": left if left is not None and self.contender.diverged else None,
            "missing": self.run.missing,
        }
        self.end(result["auc"])
        self.run.finish(result)
        return result


def evaluate(entrants: Sequence[Entrant], step: int, held_out: Iterable[Batch]) -> None:
    """Predict the held-out samples with all of them, reading each batch once.

    **Arguments**

    - `entrants`: those still in training.
    - `step`: the step after which this happens.
    - `held_out`: the held-out batches.
    """
    with rng_state.unchanged(), ExitStack() as stack:
        for entrant in entrants:
            stack.enter_context(entrant.meter.paused())
        copies = tee(held_out, len(entrants))  # they advance together, so no batch is kept for long
        going = [entrant.evaluation(step, Fresh(copy)) for entrant, copy in zip(entrants, copies, strict=True)]
        del copies
        while going:
            going = [one for one in going if next(one, going) is None]


def facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a variant's result that go into the sweep's result."""
    names = ("steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "left", "run")
    return {name: result[name] for name in names if name in result}
