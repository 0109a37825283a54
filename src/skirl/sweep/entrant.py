"""A variant of a recipe while it is trained: its logits and losses, metrics, rates, and folder."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.variants import Varied
from skirl.train.commands import Train
from skirl.train.evaluation import Evaluation
from skirl.train.flags import LogFlags
from skirl.train.meter import Meter
from skirl.train.metrics import NotFinite
from skirl.train.report.run_folder import RunFolder
from skirl.train.schedule import Rates


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
        self.meter.add(torch.tensor(loss), self.contender.kept, batch.labels)
        return loss

    def evaluate(self, batches: Lookahead, held_out: Any) -> None:
        """Predict what is held out, at the end."""
        try:
            with self.meter.paused():
                self.judge.run(batches.step, self.contender.model, held_out)
        except NotFinite:
            pass  # there is no score of it then

    def after_step(self, batches: Lookahead, *, last: bool = False) -> None:
        """Write what is due."""
        if last and self._written == self.meter.steps:
            return
        self._written = self.meter.steps if last or batches.step % self.run.every == 0 else self._written
        self.run.after_step(batches, self.meter, self.rates.now, last=last, evaluation=self.judge)

    def finish(self, batches: Lookahead, left: str | None) -> dict[str, Any]:
        """It is not trained any more; what came of it.

        **Arguments**

        - `batches`: of the sweep.
        - `left`: why it left; None: it was trained to the end.
        """
        self.after_step(batches, last=True)
        self.run.__exit__(None, None, None)
        self.done = True
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
        self.auc = result["auc"]
        self.run.finish(result)
        return result


def facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep's result has of a variant's."""
    names = ("steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "left", "run")
    return {name: result[name] for name in names if name in result}
