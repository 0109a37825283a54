"""The training loop, of one trainer or of several that share its steps, and what watches it."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.checkpoint import folder
from skirl.checkpoint.folder import headers_with_steps
from skirl.checkpoint.keeper import Asked, Keeper
from skirl.core.batch import Batch, Sparse, moved
from skirl.core.ids import capture, positions_of
from skirl.core.tables import Schema
from skirl.data.share import block
from skirl.data.source import Source
from skirl.engine.device import torch_device, words
from skirl.oracle.seen import Seen
from skirl.peers.base import Peers
from skirl.peers.job import trainers
from skirl.peers.processes import launchers_elsewhere
from skirl.pipeline.lookahead import Lookahead
from skirl.pipeline.stages import Times
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.message import pack, unpack
from skirl.tools.progress import Report, progress_of
from skirl.train.flags import EvaluationFlags, LogFlags, SaveFlags
from skirl.train.metrics import Evaluation, Meter, NotFinite
from skirl.train.recipe import Recipe
from skirl.train.resume import RULES, agreed_start, begin_from, saved_flags, told
from skirl.train.run_folder import RunFolder, Since
from skirl.train.schedule import Rates

NOT_ASKED = Asked()
OF_LOOP = ("rows", "dense", "lookups")
"""Channels on which the training loop itself waits for other trainers."""
logger = logging.getLogger("skirl")


@dataclass(slots=True)
class Done:
    """A training step after its update."""

    logits: Tensor
    labels: Tensor
    """Logits and labels of all trainers, on the first of them; empty on the others."""
    losses: Tensor
    """The loss of each shard, over all trainers."""
    loss_tensor: Tensor
    """The mean of the losses, on the device. Reading its value waits until the step is done there."""
    samples: int
    """Over all trainers."""
    finite: bool = True
    """False if another trainer has said that some of its logits are not finite."""

    @property
    def loss(self) -> float:
        return self.loss_tensor.item()


def whole(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Done:
    """The step of these shards, each with its logits, labels and loss."""
    if len(parts) == 1:
        [(logits, labels, loss)] = parts
        return Done(logits, labels, loss.reshape(1), loss, len(labels))
    logits, labels, losses = map(list, zip(*parts))
    each, labels = torch.stack(losses), torch.cat(labels)
    return Done(torch.cat(logits), labels, each, each.mean(), len(labels))


def steps(
    model: nn.Module,
    dense: torch.optim.Optimizer,
    batches: Iterable[Batch],
    rates: Rates | None = None,
    shards: int = 1,
) -> Iterator[Done]:
    """Train on every batch: this is all of training. Who consumes it sees each step after its update."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in batches:
        logit = model(batch)
        labels = moved(batch.labels, logit.device, logit.dtype)
        loss = binary_cross_entropy_with_logits(logit, labels)
        dense.zero_grad()
        loss.backward()  # rows are updated here,
        dense.step()  # dense weights here: both after the last shard
        parts.append((logit.detach(), batch.labels, loss.detach()))
        if len(parts) == shards:
            if rates is not None:
                rates.step()
            yield whole(parts)
            parts = []


def touched_rows(recipe: Recipe) -> int:
    schema = Schema.of(recipe.tables())
    touched = Seen(schema)
    with progress_of("count rows", recipe.stream().steps) as progress:
        for number, batch in enumerate(recipe.stream(), start=1):
            touched.add(keys_of(batch.sparse, schema))
            progress(number, lambda: {"touched": f"{len(touched):,}"})
    return len(touched)


def count_steps(recipe: Recipe) -> int:
    """Count the steps of all epochs, by reading one if files do not tell."""
    from skirl.data.files.stream import Files

    stream, steps = replace(recipe, data=replace(recipe.data, epochs=1)).stream(), 0
    if isinstance(stream, Files) and not (stream.rows_of_epoch or stream.encoder.keep or stream.encoder.skip):
        stream.rows_of_epoch = stream.dataset.rows()
    if stream.steps:
        return stream.steps * recipe.data.epochs
    with progress_of("count steps", None) as progress:
        for steps, _ in enumerate(stream, start=1):
            progress(steps, dict)
    return steps * recipe.data.epochs


def keys_of(sparse: Sparse, schema: Schema) -> np.ndarray:
    captured = capture(sparse, schema.features, copy=False)
    return np.concatenate([positions_of(captured, schema, bank).keys() for bank in range(len(schema.banks))])


class TrainerShare:
    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.rank, self.size = peers.rank, peers.size
        self.alone = self.size == 1
        self.first = self.rank == 0  # it shows and writes the results of the run

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with at least as many shards as trainers, a power of two. Raise if it sets too few."""
        shards = 1 << (self.size - 1).bit_length()
        if recipe.step.shards >= shards:
            return recipe
        if recipe.step.shards > 1:
            raise ValueError(
                f"{self.size} trainers share shards={recipe.step.shards}: set shards to {shards} or more, a power of two"
            )
        return replace(recipe, step=replace(recipe.step, shards=shards))

    def of(self, stream: Source, shards: int) -> Source:
        return stream.sharded(*block(self.rank, self.size, shards), shards)

    def exchange(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Send arrays to all trainers and return each one's, by rank. Call it between two steps."""
        come = self.peers.channel("lookups").exchange([pack(*arrays)] * self.size, "numbers of a run")
        return [unpack(part) for part in come]

    def whole(self, done: Done, asked: Asked = NOT_ASKED) -> tuple[Done, Asked | None]:
        """Combine a step over all trainers: the losses of all shards, in order, and their mean, as in one process. Logits
        and labels, nearly all of the bytes, go to the first trainer only. The second value is what all must do after the
        step: stop if one of them is asked to, save if the first is. It is None if there is only one trainer."""
        if self.alone:
            return done, None
        losses, *large = (t.detach().cpu().numpy().reshape(-1) for t in (done.losses, done.logits, done.labels))
        said = np.array([*asked, np.isfinite(large[0]).all(), done.samples], np.int64)
        to_first, to_others = pack(losses, said, *large), pack(losses, said, *(part[:0] for part in large))
        come = self.peers.channel("lookups").exchange(
            [to_others if rank else to_first for rank in range(self.size)], "numbers of a step"
        )
        parts = zip(*map(unpack, come), strict=True)
        losses, told, logits, labels = (torch.from_numpy(np.concatenate(of_ranks)) for of_ranks in parts)
        stop, save, finite, samples = told.view(self.size, 4).unbind(1)
        of_all = replace(
            done, loss_tensor=losses.mean(), losses=losses, logits=logits, labels=labels, samples=int(samples.sum()),
            finite=bool(finite.all()),
        )  # fmt: skip
        return of_all, Asked(stop=bool(stop.any()), save=bool(save[0]))

    def total(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The counts with each whole number summed over all trainers."""
        names = [name for name, count in counts.items() if isinstance(count, int)]
        come = self.exchange([np.array([counts[name] for name in names], np.int64)])
        sums = np.sum([part for (part,) in come], axis=0).tolist()
        return counts | dict(zip(names, sums, strict=True))


def gathered(batches: Lookahead, meter: Meter, share: TrainerShare) -> dict[str, Any] | None:
    """The result's `by_trainer`; None if there is one trainer. All trainers call this at once, between two steps."""
    if share.alone:
        return None
    engine, times, counted = batches.engines[0], batches.times, share.peers.counted()
    lane = {
        "touched": len(engine.seen),
        "cache": sum(len(cache) for cache in engine.caches),
        **{name: count for name, count in asdict(engine.counters).items() if name != "steps"},
        "seconds": meter.speed.seconds, "stall": times.stall, "read": times.read,
        "waited": sum(counted[name]["seconds"] for name in OF_LOOP),
        "busy": dict(times.busy), "sent": sum(sum(of["bytes_sent"]) for of in counted.values()),
        "peak_bytes": peak_bytes(),
    }  # fmt: skip
    return {"lanes": share.peers.channel("lookups").told(lane, "what each trainer did")}


def why_diverged(step: int, what: str, folder: Path | None, kept: Mapping[str, Any]) -> str:
    then = "start over"
    saved = [] if folder is None or kept["newest"] is None else headers_with_steps(folder)
    sound = [each for each in saved if each[0] < step - 1]  # a state whose next loss is not finite is useless, too
    if sound:
        late = ", ".join(str(header) for at, header in saved if at >= step - 1)
        then += f", or go on from step {sound[0][0]:,} in {folder} with --resume"
        then += f" once {late} is removed, which is as broken" if late else ""
    return (
        f"{what} at step {step:,}, for the first time, so training stopped there: "
        f"set --lr and --dense-lr lower, or --warmup higher, and {then}"
    )


def not_saved(saving: SaveFlags, kept: Mapping[str, Any], step: int) -> str | None:
    """Why a promised checkpoint, that of the run's end or the best, is not there; None if all are."""
    if saving.save is None:
        return None
    if kept["newest"] != step:
        newest = kept["newest"]
        then = "no step of this run is saved" if newest is None else f"the newest that is saved is step {newest:,}"
        return f"{kept['last_failure'] or f'step {step:,} is not saved'}; {then}"
    if saving.keep_best and kept["best_failure"] is not None:
        return f"{kept['best_failure']} in {saving.save / folder.BEST}"
    return None


class _Run:
    """A run's model over its rows and its data, and all that watches its training."""

    def __init__(
        self, recipe: Recipe, share: TrainerShare, folder: RunFolder, evaluation: EvaluationFlags, resume: bool
    ) -> None:
        self.share, self.folder, self.meter = share, folder, Meter()
        self.embeddings = recipe.embeddings(
            recipe.cache_size(touched_rows(recipe) if recipe.counts_first else 0), resume=resume
        )
        self.model, self.dense = recipe.model_over(self.embeddings)
        self.rates = recipe.rates_of(self.embeddings, self.dense)
        self.stream = share.of(recipe.stream(), recipe.step.shards)
        self.judge = Evaluation(every=evaluation.eval_every, patience=evaluation.patience)

    def keeper(self, saving: SaveFlags, batches: Lookahead) -> Keeper:
        return Keeper(
            saving.save, model=self.model, optimizers=[self.dense, self.rates, self.meter, self.judge, self.folder],
            data=batches, every=saving.save_every, minutes=saving.save_minutes, keep=saving.keep_last, resume=saving.resume,
            keep_best=saving.keep_best, first=self.share.first,
        )  # fmt: skip

    def loop(self, batches: Lookahead, keeper: Keeper, progress: Report) -> tuple[int, str] | None:
        """Train to the end; the step at which numbers were no longer finite and what was not, None where all were."""
        share, meter, judge, since = self.share, self.meter, self.judge, Since(batches, self.meter)
        if judge.stops:
            return None
        first = True
        for step in steps(self.model, self.dense, batches, self.rates, batches.micros):
            done, asked = share.whole(step, keeper.asked())
            if first:
                batches.times.restart()
                self.folder.open()
            first = False
            meter.add(done.loss_tensor, done.logits, done.labels, samples=done.samples, finite=done.finite)
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
            progress(batches.step, lambda: since.facts(batches, meter))
            is_best = judge.best_step == batches.step and math.isfinite(judge.best or 0.0)
            with meter.speed.paused():
                told_to_stop = keeper.after_step(asked, last=last, is_best=is_best)
            if told_to_stop or judge.stops:
                break
        return None

    def _evaluate(self, batches: Lookahead) -> None:
        """On the samples that are held out at this step; each of several trainers takes its part of them."""
        held_out, share = self.stream.held_out_at(batches.state_dict()["loader"]), self.share
        with self.meter.speed.paused():
            if share.alone or held_out is None:
                self.judge.run(batches.step, self.model, held_out or ())
            else:
                own = held_out.dealt(share.rank, share.size)
                self.judge.run(batches.step, self.model, own, exchange=share.exchange)
        with progress_of("evaluation at step", self.stream.steps) as shown:
            shown(batches.step, self.judge.facts)

    def result(self, batches: Lookahead, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Without what checkpoints add."""
        return {
            "command": "train", **flags, **self.meter.result(), **self.judge.result(),
            "stopped_early": self.judge.stops, "steps": batches.step, "begun_at": self.folder.begun_at,
            **_of_engine(batches, self.share),
            "by_trainer": gathered(batches, self.meter, self.share),
            "peak_bytes": peak_bytes(), "machine": machine(), "bad_rows_skipped": self.stream.bad_rows,
            "run": self.folder.path, "changes": self.folder.changed,
        }  # fmt: skip


def train(
    recipe: Recipe, evaluation: EvaluationFlags, saving: SaveFlags, log: LogFlags, flags: Mapping[str, Any]
) -> dict[str, Any]:
    """Train; what came of it. flags: all of the command's, to write down."""
    saved = saved_flags(saving.save) if saving.resume and saving.save else {}
    threads = recipe.use_threads(saved.get("threads"))
    share = TrainerShare(trainers(str(torch_device(recipe.device.device)), recipe.step.peer_timeout))
    recipe = share.recipe(recipe)
    log = log if share.first else replace(log, run="none", trace=None)
    flags = {**flags, "shards": recipe.step.shards, "threads": threads}
    from_other = agreed_start(share, saving, flags)
    where = {"every": log.log_every, "resume": saving.resume, "trainers": share.size}
    folder = RunFolder(log.folder(), name=f"{recipe.model.model}-{recipe.data.kind}", flags=flags, **where)
    run = _Run(recipe, share, folder, evaluation, saving.resume)
    begun_from: dict[str, Any] | None = None
    with (
        recipe.lookahead(run.model, run.stream, trace=log.trace) as batches,
        run.keeper(saving, batches) as keeper,
        progress_of("train", run.stream.steps) as progress,
        closing(folder.begin(batches, run.meter, keeper.check)),
    ):
        for line in told([change for change in folder.changed if change["flag"] in RULES["warned"]]):
            logger.warning("%s", line)
        if not from_other and saving.resume and share.first and keeper.found_none:
            logger.warning("%s holds no checkpoint: the run begins, at step 0", saving.save)
        if from_other and saving.from_ is not None:
            begun_from = begin_from(saving.from_, run.model, run.stream, share)
        elif saving.resume and not keeper.found_none:
            with progress_of("resumed at step", run.stream.steps) as shown:
                shown(batches.step, lambda: {"saved in": str(saving.save)})
        keeper.begin()
        try:
            broken = run.loop(batches, keeper, progress)
        except KeyboardInterrupt:
            saved = "" if saving.save else ", and nothing is saved, since --save is not set"
            raise KeyboardInterrupt(f" at step {batches.step:,}{saved}") from None
        if broken and run.meter.steps % folder.every:
            folder.after_step(batches, run.meter, run.rates.now, last=True, evaluation=run.judge)
        result = run.result(batches, flags)
        kept, judge = keeper.facts(), run.judge
        best = kept["best"]
        begins_again = kept["stopped_by"] is not None and launchers_elsewhere()
        result |= {
            "checkpoints": kept,
            "stopped_by": kept["stopped_by"],
            "begins_again": begins_again,
            "best": best and {**best, "test_logloss": judge.best if judge.best_step == best["step"] else None},
            "from": begun_from,
        }
        diverged = why_diverged(*broken, saving.save, kept) if broken else None
        result["failed"] = diverged or not_saved(saving, kept, batches.step)
    result["missing"] = folder.missing
    folder.finish(result)
    run.embeddings.close()
    return result | {"missing": folder.missing}


def movement_of(times: Times) -> dict[str, Any]:
    return {name: getattr(times, name) for name in ("hidden", "stall", "read", "busy", "blame")}


def _of_engine(batches: Lookahead, share: TrainerShare) -> dict[str, Any]:
    """What the result says of engines and movement; the movement is this trainer's."""
    engine, times = batches.engines[0], batches.times
    tables, staging = engine.schema.tables, engine.capacity.split.staging_rows if engine.capacity.split else []
    widths = [rule.width(table.dim) for table, rule in zip(tables, engine.packs[0].optimizers)]
    held = [words(width) if engine.half else width for width in widths]
    rows = {
        "tables": sum(table.rows for table in tables),
        "touched": engine.touched,
        "cache": sum(len(cache) for cache in engine.caches),
        "in_cache": sum(cache.filled for cache in engine.caches),
        "staging": sum(staging),
        "bytes_of_all": sum(table.rows * width * engine.dtype.itemsize for table, width in zip(tables, held)),
    }
    return {
        "trainers": share.size,
        "rows": rows | share.total({name: rows[name] for name in ("touched", "cache", "in_cache", "staging")}),
        **share.total({
            "cache_bytes": sum(cache.records.nbytes for cache in engine.caches),
            "staging_bytes": int(np.dot(staging, engine.record_bytes[: len(staging)])),
        }),
        "counters": share.total(asdict(engine.counters)) | {"steps": engine.counters.steps},
        "movement": movement_of(times),
    }  # fmt: skip
