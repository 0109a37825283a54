"""A variant of a recipe while it is trained: its losses, metrics, learning rates and folder."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.variants import Varied
from skirl.train.commands import Train
from skirl.train.evaluation import Evaluation, predicted
from skirl.train.flags import EvaluationFlags, LogFlags, SaveFlags
from skirl.train.meter import Meter
from skirl.train.metrics import Metrics, NotFinite
from skirl.train.report.run_folder import RunFolder
from skirl.train.schedule import Rates


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
    - `evaluation`: when it is evaluated.
    - `from_`: the run that it begins from.
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
        evaluation: EvaluationFlags | None = None,
        from_: Path | None = None,
        resume: bool = False,
        table: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.variant, self.contender, self.rates = variant, contender, rates
        self.meter = Meter(lists)
        evaluation = evaluation or EvaluationFlags()
        self.judge = Evaluation(every=evaluation.eval_every, patience=evaluation.patience)
        alone = Train(
            recipe=variant.recipe, evaluation=EvaluationFlags(**vars(evaluation)), save=SaveFlags(from_=from_),
            log=LogFlags(run=folder, log_every=every),
        )  # fmt: skip
        self.flags = alone.flat()
        self.begun_from: dict[str, Any] | None = None
        """What it took over from another run at its start."""
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
    def rows(self) -> dict[str, int]:
        """How many rows were touched, how many its cache has, and how many were fetched again."""
        engine = self.contender.embeddings.engine
        cache = sum(len(cache) for cache in engine.caches)
        return {"touched": len(engine.seen), "cache": cache, "fetched": engine.counters.fetched}

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
        if last and (self._written == self.meter.steps or batches.step == self.run.begun_at):
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

    def finish(self, batches: Lookahead, left: str | None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Close its run, write its result and return it.

        **Arguments**

        - `batches`: the lookahead of the sweep.
        - `left`: why it left; None if it was trained to the end.
        - `more`: further entries for the result; its `missing` is added to that of the run.
        """
        more = dict(more or {})
        self.after_step(batches, last=True)
        self.run.__exit__(None, None, None)
        result = {
            "command": "train",
            **self.flags,
            **self.meter.result(),
            **self.judge.result(),
            "stopped_early": self.judge.stops,
            "steps": self.meter.steps,
            "begun_at": self.run.begun_at,
            "left": left,
            "run": self.run.path,
            "checkpoints": {"stopped_by": None},
            "failed": left if left is not None and self.contender.diverged else None,
            "from": self.begun_from,
            "rows": self.rows,
            **more,
            "missing": self.run.missing + more.get("missing", []),
        }
        self.end(result["auc"])
        self.run.finish(result)
        return result


def facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a variant's result that go into the sweep's result."""
    names = (
        "steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "stopped_early", "best",
        "left", "run",
    )  # fmt: skip
    return {name: result[name] for name in names if name in result}
