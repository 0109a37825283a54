"""The variants of a sweep that one process trains, step by step. All answers are plain data."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import tee
from math import nan
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead, lookahead
from skirl.sweep.checkpoint import SweepSaving, load_all
from skirl.sweep.contender import Contender
from skirl.sweep.race import Judged
from skirl.sweep.sweep import FORMS, Diverged, Sweep
from skirl.sweep.variants import Variant, Varied
from skirl.tools import rng_state
from skirl.tools.flags import flat_of
from skirl.tools.machine import peak_bytes
from skirl.tools.os_errors import NotWritten
from skirl.train.flags import EvaluationFlags, LogFlags, SaveFlags
from skirl.train.loop import touched_rows
from skirl.train.metrics import Evaluation, Meter, Metrics, NotFinite, evaluating
from skirl.train.recipe import Recipe
from skirl.train.resume import Origin, begin_from
from skirl.train.run_folder import RunFolder
from skirl.train.schedule import Rates


def loss_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss that `skirl train` uses, and the logits."""
    logits = model(batch)
    return binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype)), logits.detach()


class Entrant:
    def __init__(self, variant: Varied, contender: Contender, duty: "Duty") -> None:
        self.variant, self.contender = variant, contender
        self.rates: Rates = variant.recipe.rates_of(contender.embeddings, contender.dense)  # type: ignore[arg-type]
        self.meter = Meter()
        self.judge = Evaluation(every=duty.evaluation.eval_every)
        folder = duty.folder(variant.name)
        kept = None if duty.save is None else duty.save / variant.name
        saved = SaveFlags(save=kept, keep_best=duty.keep_best, from_=duty.from_)
        alone = (saved, LogFlags(run=folder, log_every=duty.every))
        self.flags = flat_of(variant.recipe, duty.evaluation, *alone)
        self.begun_from: dict[str, Any] | None = None
        self.run = RunFolder(folder, name=variant.name, flags=self.flags, every=duty.every, resume=duty.resume)
        self._written = 0
        """Last step covered by a line of metrics."""

    @property
    def parts(self) -> list[Any]:
        """What a checkpoint saves besides its model, as `skirl train` does."""
        return [self.contender.dense, self.rates, self.meter, self.judge, self.run]

    @property
    def rows(self) -> dict[str, int]:
        engine = self.contender.embeddings.engine
        cache = sum(len(cache) for cache in engine.caches)
        return {"touched": len(engine.seen), "cache": cache, "fetched": engine.counters.fetched}

    @property
    def loss(self) -> float:
        return nan if self.contender.loss is None else self.contender.loss

    def step(self, batch: Batch) -> None:
        self.rates.step()
        # Predictions of a variant that has diverged and left do not count.
        logits = self.contender.kept if self.contender.left is None else torch.empty(0)
        self.meter.add(torch.tensor(self.loss), logits, batch.labels)

    def evaluation(self, step: int, held_out: Iterable[Batch]) -> Iterator[None]:
        """Predict the held-out samples, one batch per `next`, and record their scores at the end."""
        metrics, began = Metrics(), time.monotonic()
        with suppress(NotFinite), evaluating(self.contender.model, held_out) as found:  # no scores then
            for batch in found:
                with torch.no_grad():
                    logits = self.contender.model(batch)
                metrics.update(logits, batch.labels)
                yield
            self.judge.add(step, metrics.scores(), time.monotonic() - began)

    def after_step(self, batches: Lookahead, *, last: bool = False) -> None:
        if last and (self._written == self.meter.steps or batches.step == self.run.begun_at):
            return
        self._written = self.meter.steps if last or batches.step % self.run.every == 0 else self._written
        self.run.after_step(batches, self.meter, self.rates.now, last=last, evaluation=self.judge)

    def finish(self, batches: Lookahead, left: str | None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        more = dict(more or {})
        self.after_step(batches, last=True)
        self.run.__exit__(None, None, None)
        result = {
            "command": "train",
            **self.flags,
            **self.meter.result(),
            **self.judge.result(),
            "stopped_early": False,
            "steps": self.meter.steps,
            "begun_at": self.run.begun_at,
            "left": left,
            "run": self.run.path,
            "checkpoints": {"stopped_by": None},
            "failed": left if left is not None and self.contender.diverged else None,
            "from": self.begun_from,
            "exact": self.contender.exact,
            "rows": self.rows,
            **more,
            "missing": self.run.missing + more.get("missing", []),
        }
        del self.rates  # they hold its optimizers and thus its weights
        self.run.finish(result)
        return result


def facts(result: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "steps", "samples", "loss", "auc", "logloss", "ne", "test_auc", "test_logloss", "best", "left", "run", "exact",
    )  # fmt: skip
    return {name: result[name] for name in names if name in result}


log = logging.getLogger("skirl")


@dataclass(frozen=True)
class Duty:
    recipe: Recipe
    variants: Sequence[Varied]
    every: int
    folder: Callable[[str], str]
    resume: bool = False
    goes_on: bool = False
    trace: Path | None = None
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    save: Path | None = None
    keep_best: bool = False
    from_: Path | None = None
    origin: Origin | None = None
    inexact: bool = False
    memory: str | None = None


@dataclass(frozen=True)
class Stepped:
    step: int
    losses: dict[str, float]
    samples: int
    saving: bool
    unseen: bool
    """Whether nobody had trained on its samples: they are of the first epoch."""
    last: bool
    """Whether the stream ends with it, which only who reads the stream knows."""


class Crew:
    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        recipe = duty.recipe
        self.stream = recipe.stream()
        self.sweep = sweep_of(recipe, duty.variants, resume=duty.goes_on, inexact=duty.inexact, memory=duty.memory)
        try:
            self.entrants = {
                variant.name: Entrant(variant, contender, duty)
                for variant, contender in zip(duty.variants, self.sweep.variants, strict=True)
            }
        except BaseException:
            self.sweep.close()  # a second try must find its stores free
            raise
        self._open = ExitStack()
        self._runs = ExitStack()
        self._saving: SweepSaving | None = None
        self._left: set[str] = set()
        self._coming: Iterator[Batch] | None = None

    def __enter__(self) -> "Crew":
        recipe, cache = self._duty.recipe, self._duty.recipe.cache
        with ExitStack() as stack:
            stack.enter_context(self.sweep)
            self.batches: Lookahead = stack.enter_context(
                lookahead(
                    self.stream, self.sweep, depth=cache.depth, prefetch=recipe.movement.prefetch, policy=cache.policy,
                    trace=self._duty.trace,
                )
            )  # fmt: skip
            stack.enter_context(self._runs)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def begin(self, path: Path | None, header: Mapping[str, Any] | None) -> int:
        if header is not None:
            assert path is not None
            load_all(path, header, self.sweep.racing, self.batches, self._parts)
            for contender in self.sweep.racing:  # it may have had inexact steps before
                contender.exact = not self._duty.inexact
        elif (origin := self._duty.origin) is not None:
            for contender in self.sweep.racing:
                with contender.drawing():
                    self.entrants[contender.name].begun_from = begin_from(origin, contender.model, self.stream)
        for entrant in self.entrants.values():
            self._runs.enter_context(entrant.run.begin(self.batches, entrant.meter))
        return self.batches.step

    def step(self) -> Stepped | None:
        """Train all variants on the next batch. Return None if there is none."""
        if self._coming is None:
            self._coming = iter(self.batches)
        batch = next(self._coming, None)
        if batch is None:
            return None
        racing = [self.entrants[name] for name in self.racing]
        samples = max(entrant.meter.samples for entrant in self.entrants.values()) + len(batch.labels)
        saving = self._saving is not None and not self._saving.done

        with suppress(Diverged):  # if all of this crew did, others may go on
            self.sweep.step(batch)
        for entrant in racing:
            entrant.step(batch)
        losses = {entrant.variant.name: entrant.loss for entrant in racing}
        step, first = self.batches.step, self.stream.first_epoch
        unseen = first is None or step <= first
        return Stepped(step, losses, samples, saving, unseen, last=step == self.stream.steps)

    def leave(
        self, why: Mapping[str, str], more: Mapping[str, Mapping[str, Any]] | None = None, *, save: Path | None = None
    ) -> dict[str, dict[str, Any]]:
        """Let those of these variants leave that are here. A crew that has no variants left stops training."""
        results, here = {}, set(self.racing)
        for name, reason in why.items():
            if name not in here:
                continue
            own = {"rows": self.entrants[name].rows, **(more or {}).get(name, {})}  # known until its memory is freed
            if save is not None:
                own["missing"] = self._save_last(name, save)
            if self.sweep[name].left is None and len(self.sweep) > 1:
                self.sweep.drop(name, reason)
            results[name] = self.entrants[name].finish(self.batches, reason, own)
            self._left.add(name)
        if here and not self.racing:  # others may go on for a long time
            self._let_go()
        return results

    def _save_last(self, name: str, path: Path) -> list[str]:
        """Save a variant that stops, as a run is saved at its end. Return a sentence if it cannot be written."""
        self.entrants[name].after_step(self.batches, last=True)
        if self._saving is not None:
            self._saving.ended()
        try:
            self.sweep.save_one(path, name, self._parts)
        except NotWritten as error:
            missing = f"the last checkpoint of variant {name}, of step {self.batches.step:,}, is missing: {error}"
            log.warning("%s", missing)
            return [missing]
        return []

    def _let_go(self) -> None:
        if self._saving is not None:
            self._saving.ended()
            self.sweep.saving = None  # a failed write is reported when somebody waits for it
        self._open.close()
        self.sweep.forms.forget()
        for contender in self.sweep.racing:
            contender.leave("no variant is left", self.batches.step)
        self.sweep.engine.release()

    def evaluate(self, *, last: bool) -> dict[str, Judged | None]:
        """Predict the held-out samples with all variants that are due. Return the scores of each, None if not finite."""
        step = self.batches.step
        due = [entrant for entrant in map(self.entrants.__getitem__, self.racing) if entrant.judge.due(step, last=last)]
        if not due:
            return {}
        return evaluate(due, step, self.stream.held_out_at(self.batches.state_dict()["loader"]) or ())

    def end_step(self, *, last: bool) -> None:
        for entrant in map(self.entrants.__getitem__, self.racing):
            entrant.after_step(self.batches, last=last)

    def aucs(self) -> dict[str, float | None]:
        return {name: self.entrants[name].meter.metrics.scores().auc for name in self.racing}

    def save(self, path: Path) -> dict[str, str]:
        if not self.racing:
            return {}
        self.sweep.settle()
        self.sweep.saving = self._saving = self.sweep.begin_saving(path, self._parts, None)
        return self._saving.names

    def wait_saved(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def confirm(self) -> None:
        """Remove older checkpoints: the header names the newest."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.confirmed()

    def finish(self, more: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
        more = more or {}
        return {name: self.entrants[name].finish(self.batches, None, more.get(name)) for name in self.racing}

    def window(self) -> int:
        return self.batches.window

    def facts(self) -> dict[str, float]:
        steps = {f"{form}_steps": self.sweep.forms.steps[form] for form in FORMS}
        return {"plans": self.sweep.plans, "peak_bytes": peak_bytes(), "cpu_seconds": time.process_time(), **steps}

    @property
    def racing(self) -> list[str]:
        return [name for name in self.entrants if name not in self._left]

    def _parts(self, contender: Contender) -> list[Any]:
        return self.entrants[contender.name].parts


def check_pooled(variants: Sequence[Varied]) -> None:
    pooled = {variant.recipe.pooled: variant for variant in reversed(variants)}
    if len(pooled) > 1:
        raise ValueError(
            f"variant {pooled[True].name} pools the ids of a feature and {pooled[False].name} does not: run two sweeps"
        )


def sweep_of(recipe: Recipe, variants: Sequence[Varied], **more: Any) -> Sweep:
    check_pooled(variants)
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


def evaluate(entrants: Sequence[Entrant], step: int, held_out: Iterable[Batch]) -> dict[str, Judged | None]:
    """Predict the held-out samples with all variants, reading each batch once. Return the scores by name.

    A variant whose predictions are not finite has None.
    """
    with rng_state.unchanged(), ExitStack() as stack:
        for entrant in entrants:
            stack.enter_context(entrant.meter.speed.paused())
        copies = tee(held_out, len(entrants))  # they advance together, so no batch is kept for long
        going = [entrant.evaluation(step, copy) for entrant, copy in zip(entrants, copies, strict=True)]
        del copies
        while going:
            going = [one for one in going if next(one, going) is None]
    return {e.variant.name: Judged.of(e.judge) if e.judge.step == step else None for e in entrants}
