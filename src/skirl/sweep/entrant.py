"""A variant of a recipe while it is trained: its logits and losses, metrics, rates, and folder."""

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
    """The loss that `skirl train` has, and the logits."""
    logits = model(batch)
    return binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype)), logits.detach()


class Entrant:
    """One variant, and what is kept of its run.

    **Arguments**

    - `variant`: what it is.
    - `contender`: itself, in the sweep.
    - `rates`: its learning rates.
    - `lists`: features with any number of ids a sample.
    - `folder`: of its run, or "none".
    - `every`: steps between two lines of metrics.
    - `resume`: whether it will go on from a checkpoint.
    - `table`: what differs between variants, of each by its name.
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
        """Of all its predictions, once it is done."""
        self.done = False
        """It is not trained any more, and all is written down."""
        self._written = 0
        """The last step that a line of metrics tells of."""

    @property
    def parts(self) -> list[Any]:
        """What a checkpoint has of it, as one of `skirl train` has."""
        return [self.contender.dense, self.rates, self.meter, self.judge, self.run]

    def step(self, batch: Batch) -> float:
        """It was trained on a batch; its loss.

        **Arguments**

        - `batch`: that batch.
        """
        loss = nan if self.contender.loss is None else self.contender.loss
        self.rates.step()
        # Of one that has diverged, and has left, no prediction counts.
        logits = self.contender.kept if self.contender.left is None else torch.empty(0)
        self.meter.add(torch.tensor(loss), logits, batch.labels)
        return loss

    def evaluation(self, step: int, held_out: Iterable[Batch]) -> Iterator[None]:
        """Predict what is held out, a batch with each `next`; at the end there are scores of it.

        **Arguments**

        - `step`: after which it is.
        - `held_out`: batches.
        """
        metrics, began = Metrics(), time.monotonic()
        with suppress(NotFinite), closing(predicted(self.contender.model, held_out)) as found:  # there is no score then
            for batch, logits in found:
                metrics.update(logits, batch.labels)
                yield
            self.judge.add(step, metrics.scores(), time.monotonic() - began)

    def after_step(self, batches: Lookahead, *, last: bool = False) -> None:
        """Write what is due."""
        if last and self._written == self.meter.steps:
            return
        self._written = self.meter.steps if last or batches.step % self.run.every == 0 else self._written
        self.run.after_step(batches, self.meter, self.rates.now, last=last, evaluation=self.judge)

    def end(self, auc: float | None) -> None:
        """All is known of it: its optimizers, and with them its weights, are let go.

        **Arguments**

        - `auc`: of all its predictions.
        """
        self.auc, self.done = auc, True
        del self.rates

    def finish(self, batches: Lookahead, left: str | None) -> dict[str, Any]:
        """It is not trained any more; what came of it.

        **Arguments**

        - `batches`: of the sweep.
        - `left`: why it left; None: it was trained to the end.
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
    """Predict what is held out with all of them; each batch is read once.

    **Arguments**

    - `entrants`: those that are still trained.
    - `step`: after which it is.
    - `held_out`: batches.
    """
    with rng_state.unchanged(), ExitStack() as stack:
        for entrant in entrants:
            stack.enter_context(entrant.meter.paused())
        copies = tee(held_out, len(entrants))  # they go on together, so that no batch is kept for long
        going = [entrant.evaluation(step, Fresh(copy)) for entrant, copy in zip(entrants, copies, strict=True)]
        del copies
        while going:
            going = [one for one in going if next(one, going) is None]


def facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep's result has of a variant's."""
    names = ("steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "left", "run")
    return {name: result[name] for name in names if name in result}
