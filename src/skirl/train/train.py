"""The training loop, and what watches it."""

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.checkpoint.keeper import Keeper
from skirl.core.batch import Batch, moved
from skirl.data.source import Source
from skirl.nn.collection import Collection
from skirl.peers.processes import launchers_elsewhere
from skirl.pipeline.lookahead import Lookahead
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress
from skirl.train.diverged import sentence
from skirl.train.done import Done, whole
from skirl.train.evaluation import Evaluation
from skirl.train.fine_tuning import begin_from
from skirl.train.flags import EvaluationFlags, LogFlags, SaveFlags, ShowFlags
from skirl.train.kept import agreed_start, best_of, not_saved
from skirl.train.meter import Meter
from skirl.train.metrics import NotFinite
from skirl.train.origin import note
from skirl.train.recipe import Recipe
from skirl.train.report.lanes import gathered
from skirl.train.report.run_folder import RunFolder
from skirl.train.resumed import LEARNING, told
from skirl.train.schedule import Rates
from skirl.train.touched import Touched
from skirl.train.trainers import TrainerShare

logger = logging.getLogger("skirl")


def steps(
    model: nn.Module,
    dense: torch.optim.Optimizer,
    batches: Iterable[Batch],
    rates: Rates | None = None,
    shards: int = 1,
) -> Iterator[Done]:
    """Train on every batch: this is all of training. Who consumes it sees each step after its update."""
    parts: list[Batch] = []
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    for batch in batches:
        logit = model(batch)
        labels = moved(batch.labels, logit.device, logit.dtype)
        loss = binary_cross_entropy_with_logits(logit, labels)
        dense.zero_grad()
        loss.backward()  # rows are updated here,
        dense.step()  # dense weights here: both after the last shard
        parts.append(batch)
        logits.append(logit.detach())
        losses.append(loss.detach())
        if len(parts) == shards:
            if rates is not None:
                rates.step()
            yield whole(parts, logits, losses)
            parts, logits, losses = [], [], []


@dataclass(frozen=True)
class _Run:
    """A run's model and data, and all that watches its training."""

    recipe: Recipe
    share: TrainerShare
    folder: RunFolder
    embeddings: Collection
    model: nn.Module
    dense: torch.optim.Optimizer
    rates: Rates
    stream: Source
    """The batches of this trainer."""
    meter: Meter
    judge: Evaluation

    @classmethod
    def made(
        cls,
        recipe: Recipe,
        share: TrainerShare,
        folder: RunFolder,
        evaluation: EvaluationFlags,
        show: ShowFlags,
        *,
        resume: bool,
    ) -> "_Run":
        """The model over its rows, once it is known how many the cache is to hold."""
        cache = recipe.cache_size(_count(recipe, show) if recipe.counts_first else 0)
        embeddings = recipe.embeddings(cache, resume=resume)
        model, dense = recipe.model_over(embeddings)
        rates, stream = recipe.rates_of(embeddings, dense), share.of(recipe.stream(), recipe.step.shards)
        judge = Evaluation(every=evaluation.eval_every, patience=evaluation.patience)
        meter = Meter(stream.lists)
        return cls(recipe, share, folder, embeddings, model, dense, rates, stream, meter, judge)

    def saved(self, saving: SaveFlags) -> dict[str, Any]:
        """Return the arguments of a `Keeper`: what it saves, and when."""
        return {
            "model": self.model, "optimizers": [self.dense, self.rates, self.meter, self.judge, self.folder],
            "every": saving.save_every, "minutes": saving.save_minutes, "keep": saving.keep, "resume": saving.resume,
            "keep_best": saving.keep_best, "first": self.share.first,
        }  # fmt: skip

    def loop(self, batches: Lookahead, keeper: Keeper, progress: Progress) -> tuple[int, str] | None:
        """Train to the end; the step at which numbers were no longer finite and what was not, None where all were."""
        share, meter, judge = self.share, self.meter, self.judge
        if judge.stops:
            return None
        for step in steps(self.model, self.dense, batches, self.rates, batches.micros):
            done, asked = share.whole(step, keeper.asked())
            meter.add(done.loss_tensor, done.logits, done.labels, samples=done.samples, finite=done.finite)
            for batch in done.batches:
                meter.repeats.add(batch.sparse)
            last = batches.step == self.stream.steps
            if meter.diverged(last=last):
                return meter.not_finite
            if self.stream.held_out and judge.due(batches.step, last=last):
                try:
                    self._evaluate(batches)
                except NotFinite:
                    return batches.step, "predictions for the samples held out are not finite"
            last = last or judge.stops
            self.folder.after_step(batches, meter, self.rates.now, last=last, evaluation=judge)
            progress(batches.step, lambda: meter.facts(batches))
            is_best = judge.best_step == batches.step and math.isfinite(judge.best or 0.0)
            if keeper.after_step(asked, last=last, is_best=is_best) or judge.stops:
                break
        return None

    def _evaluate(self, batches: Lookahead) -> None:
        """On the samples that are held out at this step; each of several trainers takes its part of them."""
        held_out, share = self.stream.held_out_at(batches.state_dict()["loader"]), self.share
        with self.meter.speed.paused():
            if share.alone or held_out is None:
                self.judge.run(batches.step, self.model, held_out or ())
                return
            own = held_out.dealt(share.rank, share.size)
            self.judge.run(batches.step, self.model, own, exchange=share.exchange)

    def result(self, batches: Lookahead, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the run, without what checkpoints add."""
        return {
            "command": "train",
            **flags,
            **self.meter.result(),
            **self.judge.result(),
            "stopped_early": self.judge.stops,
            "steps": batches.step,
            "begun_at": self.folder.begun_at,
            **_of_engine(batches, self.share),
            "network": self.share.network(),
            "by_trainer": gathered(batches, self.meter, self.share),
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "bad_rows_skipped": self.stream.bad_rows,
            "first_bad_row": self.stream.first_bad_row,
            "run": self.folder.path,
            "changes": self.folder.changed,
        }


def train(
    recipe: Recipe,
    evaluation: EvaluationFlags,
    saving: SaveFlags,
    log: LogFlags,
    show: ShowFlags,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """Train, showing progress; what came of it. flags: all of the command's, to write down."""
    recipe.use_threads()
    share = TrainerShare.of_job(recipe.device.device, recipe.peers.peer_patience)
    recipe, (log, show) = share.recipe(recipe), share.shown(log, show)
    flags = {**flags, "shards": recipe.step.shards}
    origin = agreed_start(share, saving, flags)
    folder = run_folder(recipe, log, flags, resume=saving.resume, trainers=share.size)
    if share.first and saving.save is not None and (origin is not None or not saving.resume):
        note(saving.save, origin)
    run = _Run.made(recipe, share, folder, evaluation, show, resume=saving.resume)
    begun_from: dict[str, Any] | None = None
    with (
        recipe.lookahead(run.model, run.stream, trace=log.trace) as batches,
        Keeper(saving.save, **run.saved(saving), data=batches) as keeper,
        _progress("train", recipe, show, said=True) as progress,
        folder.begin(batches, run.meter, keeper.check),
    ):
        for line in told([change for change in folder.changed if change["flag"] in LEARNING]):
            logger.warning("%s", line)
        if origin is None and saving.resume and share.first and keeper.found_none:
            logger.warning("%s holds no checkpoint: the run begins, at step 0", saving.save)
        if origin is not None:
            begun_from = begin_from(origin, run.model, run.stream, share, save=saving.save)
        keeper.begin()
        broken = run.loop(batches, keeper, progress)
        if broken and run.meter.steps % folder.every:
            folder.after_step(batches, run.meter, run.rates.now, last=True, evaluation=run.judge)
        result = run.result(batches, flags)
        kept = keeper.facts()
        result |= {
            "checkpoints": kept,
            "begins_again": kept["stopped_by"] is not None and launchers_elsewhere(),
            "best": best_of(kept, run.judge),
            "from": begun_from,
        }
        result["failed"] = (
            (sentence(*broken, saving.save, kept) if broken else None)
            or not_saved(saving, kept, batches.step)
            or ratio_failure(flags["assert_ratio"], result["rows"], result["counters"]["fetched"])
        )
    timeline = [] if batches.trace_ended is None else [f"the timeline {log.trace} ends early: {batches.trace_ended}"]
    result["missing"] = folder.missing + timeline
    folder.finish(result)
    run.embeddings.close()
    return result | {"missing": folder.missing + timeline}


def run_folder(
    recipe: Recipe, log: LogFlags, flags: Mapping[str, Any], *, resume: bool, trainers: int = 1
) -> RunFolder:
    """Where the run is written down."""
    name = f"{recipe.model.model}-{recipe.data.kind}"
    return RunFolder(
        log.folder(), name=name, flags=flags, every=log.log_every, wandb=log.wandb, resume=resume, trainers=trainers
    )


def _progress(title: str, recipe: Recipe, show: ShowFlags, *, said: bool = False) -> Progress:
    """Return the progress of a run. said: whether it begins with what is trained, since most of it may be defaults."""
    steps, to = recipe.stream().steps, sys.stderr if show.json else sys.stdout
    begun = _said(recipe, steps) if said else ""
    return Progress(title, steps=steps, to=to, quiet=show.quiet, begun=begun)


def _said(recipe: Recipe, steps: int | None) -> str:
    many = "all" if steps is None else f"{steps:,}"
    return (
        f"{recipe.model.model} of dim {recipe.model.dim} on {recipe.data.data}: {many} batches of {recipe.data.batch:,}, "
        f"--cache {recipe.cache.cache}"
    )


def _count(recipe: Recipe, show: ShowFlags) -> int:
    """A pass over the ids: how many rows the run will touch."""
    touched = Touched(recipe.tables())
    with _progress("count rows", recipe, show) as progress:
        for number, batch in enumerate(recipe.stream(), start=1):
            touched.add(batch.sparse)
            progress(number, lambda: {"touched": f"{touched.rows:,}"})
    return touched.rows


def _of_engine(batches: Lookahead, share: TrainerShare) -> dict[str, Any]:
    """Return the part of the result about the engines and about movement; the movement is this trainer's."""
    engine, times = batches.engine, batches.times
    widths = {t: engine.held[i] for i, bank in enumerate(engine.schema.banks) for t in bank.tables}
    tables = engine.schema.tables
    rows = {
        "tables": sum(table.rows for table in tables),
        "touched": len(engine.seen),
        "cache": sum(len(cache) for cache in engine.caches),
        "in_cache": sum(cache.filled for cache in engine.caches),
        "staging": sum(size.staging_rows for size in engine.sizes()),
        "bytes_of_all": sum(table.rows * widths[t] * engine.dtype.itemsize for t, table in enumerate(tables)),
    }
    return {
        "trainers": share.size,
        "rows": rows | share.total({name: rows[name] for name in ("touched", "cache", "in_cache", "staging")}),
        **share.total(
            {
                "cache_bytes": sum(cache.records.nbytes for cache in engine.caches),
                "staging_bytes": sum(size.staging_rows * size.record_bytes for size in engine.sizes()),
            }
        ),
        "counters": share.total(asdict(engine.counters)) | {"steps": engine.counters.steps},
        "movement": {"hidden": times.hidden, "stall": times.stall, "read": times.read, "busy": times.busy},
    }


def ratio_failure(ratio: float | None, rows: Mapping[str, int], fetched: int) -> str | None:
    """Say why a run fails that was to touch many more rows than the cache has. Return None if it did."""
    if ratio is None:
        return None
    if rows["touched"] < ratio * rows["cache"]:
        return (
            f"{rows['touched']:,} rows were touched, less than {ratio:g} x the cache of {rows['cache']:,}: "
            "use a smaller --cache or more --steps"
        )
    return None if fetched else "no row was fetched again: use a smaller --cache or more --steps"
