"""A variant in its sweep, with all that `skirl train` has beside its model: rates, metrics, evaluations and a run folder."""

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead
from skirl.sweep.contender import Contender
from skirl.sweep.sweep import Sweep
from skirl.sweep.variants import KeepFlags, Variant, Varied
from skirl.tools.flags import flat_of
from skirl.train.flags import EvaluationFlags, LogFlags, SaveFlags
from skirl.train.loop import movement_of, touched_rows
from skirl.train.metrics import Evaluation, Meter, Metrics, NotFinite, evaluating
from skirl.train.recipe import Recipe
from skirl.train.run_folder import Missing, RunFolder
from skirl.train.schedule import Rates


def loss_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss that `skirl train` uses, and the logits."""
    logits = model(batch)
    return binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype)), logits.detach()


class Entrant:
    def __init__(
        self, variant: Varied, contender: Contender, keeping: KeepFlags, evaluation: EvaluationFlags, logged: LogFlags
    ) -> None:
        self.name, self.contender = variant.name, contender
        self.rates: Rates = variant.recipe.rates_of(contender.embeddings, contender.dense)  # type: ignore[arg-type]
        self.meter = Meter()
        self.judge = Evaluation(every=evaluation.eval_every)
        save = None if keeping.save is None else keeping.save / variant.name
        self.flags = flat_of(variant.recipe, evaluation, SaveFlags(save=save), logged)
        self.run = RunFolder(
            logged.run, name=variant.name, flags=self.flags, every=logged.log_every, resume=keeping.resume
        )
        contender.parts += [self.rates, self.meter, self.judge, self.run]
        self.missing = Missing()
        """What else than its run folder lacks."""
        self._written = 0
        """Last step covered by a line of metrics."""

    @property
    def loss(self) -> float:
        return nan if self.contender.loss is None else self.contender.loss

    def step(self, batch: Batch) -> None:
        self.run.open()
        self.rates.step()
        # Predictions of a variant that has diverged and left do not count.
        logits = self.contender.kept if self.contender.left is None else torch.empty(0)
        self.meter.add(torch.tensor(self.loss), logits, batch.labels)

    def after_step(self, batches: Lookahead, *, last: bool = False) -> None:
        if last and (self._written == self.meter.steps or batches.step == self.run.begun_at):
            return
        self._written = self.meter.steps if last or batches.step % self.run.every == 0 else self._written
        self.run.after_step(batches, self.meter, self.rates.now, last=last, evaluation=self.judge)

    def finish(self, batches: Lookahead, left: str | None) -> dict[str, Any]:
        """End its run, and return its result."""
        self.after_step(batches, last=True)
        self.run.close()
        engine = self.contender.embeddings.engine
        cache = sum(len(cache) for cache in engine.caches)
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
            "exact": self.contender.exact,
            "rows": {"touched": len(engine.seen), "cache": cache},
            "counters": asdict(engine.counters),
            "movement": movement_of(batches.times),
            "missing": [*self.run.missing, *self.missing.told()],
        }
        del self.rates  # they hold its optimizers and thus its weights
        self.run.finish(result)
        return result


def sweep_of(recipe: Recipe, variants: Sequence[Varied], **more: Any) -> Sweep:
    recipes = {variant.name: variant.recipe for variant in variants}
    shared = []
    for v in variants:
        own = {"dim": v.recipe.model.row_dim, "optimizer": v.recipe.row_optimizer(), "seed": v.recipe.data.seed}
        shared.append(Variant(v.name, {**v.overrides, **own}))
    return Sweep(
        lambda contender: recipes[contender.name].model_over(contender.embeddings),
        shared,
        recipe.tables(),
        cache=recipe.cache_size(touched_rows(recipe) if recipe.counts_first else 0),
        store=recipe.cache.store,
        loss=loss_of,
        pooled=variants[0].recipe.pooled,
        dtype=getattr(torch, recipe.device.dtype),
        device=recipe.device.device,
        threads=recipe.device.threads or 1,
        **more,
    )


def evaluate(entrants: Sequence[Entrant], step: int, held_out: Iterable[Batch]) -> dict[str, float | None]:
    """Predict the held-out samples with all variants, reading each batch once. Return the lowest log loss so far, by name:
    None if predictions are not finite."""
    metrics, began = {entrant.name: Metrics() for entrant in entrants}, time.monotonic()
    models = nn.ModuleList(entrant.contender.model for entrant in entrants)
    with ExitStack() as paused, evaluating(models, held_out) as found, torch.no_grad():
        for entrant in entrants:
            paused.enter_context(entrant.meter.speed.paused())
        for batch in found:
            for entrant in [entrant for entrant in entrants if entrant.name in metrics]:
                try:
                    metrics[entrant.name].update(entrant.contender.model(batch), batch.labels)
                except NotFinite:
                    del metrics[entrant.name]
    for one in entrants:
        if one.name in metrics:
            one.judge.add(step, metrics[one.name].scores(), time.monotonic() - began)
    return {one.name: one.judge.best if one.name in metrics else None for one in entrants}
