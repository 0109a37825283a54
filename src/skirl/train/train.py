"""`skirl train`: the training loop, and what watches it.

All of training is `steps`, a generator of twelve lines: whoever consumes it (the command here, `skirl verify`, a test) sees
each step after its update and cannot change it. A trainer class with callbacks would hide the order of forward, backward
and update, which is what a reader comes for.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.checkpoint.keeper import Keeper, SaveFlags
from skirl.core.batch import Batch, moved
from skirl.pipeline.lookahead import Lookahead
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress, clock, size
from skirl.train.evaluation import Evaluation, EvaluationFlags
from skirl.train.meter import Meter
from skirl.train.recipe import Recipe, Touched
from skirl.train.report.run_folder import RunFlags, RunFolder
from skirl.train.schedule import Rates


@dataclass(slots=True)
class Done:
    """One step after its update."""

    batch: Batch
    logits: Tensor
    loss_tensor: Tensor
    """On the device; who asks for the number waits until the step is done there."""

    @property
    def loss(self) -> float:
        """The mean over the batch."""
        return self.loss_tensor.item()


def steps(
    model: nn.Module, dense: torch.optim.Optimizer, batches: Iterable[Batch], rates: Rates | None = None
) -> Iterator[Done]:
    """Train on every batch: this is all there is to it."""
    for batch in batches:
        logits = model(batch)
        labels = moved(batch.labels, logits.device, logits.dtype)
        loss = binary_cross_entropy_with_logits(logits, labels)
        dense.zero_grad()
        loss.backward()  # rows are updated here,
        dense.step()  # dense weights here
        if rates is not None:
            rates.step()
        yield Done(batch, logits.detach(), loss.detach())


@dataclass(frozen=True)
class Train(EvaluationFlags, RunFlags, SaveFlags, Recipe):
    """Train a model whose tables are larger than the cache.

    >>> result = Train("synthetic:tiny", "dlrm-tiny", dim=4, batch=64, steps=20, cache="touched:25%", quiet=True).run()
    >>> result["rows"]["touched"] >= 4 * result["rows"]["cache"], result["failed"]
    (True, None)
    """

    trace: Path | None = None
    """A file for the timeline of all stages, to open in https://ui.perfetto.dev: 1.3 KB a step."""
    assert_ratio: float | None = None
    """Fail unless the run touches at least this many times the rows of the cache and fetches rows again."""
    json: bool = False
    """Print the results as one line of JSON; progress then goes to the standard error."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        self.check_labels()
        if self.assert_ratio is not None and not self.assert_ratio > 0:
            raise ValueError(f"assert_ratio is {self.assert_ratio}: set it to a number above 0")
        self.check_evaluation(self.valid)
        RunFlags.__post_init__(self)
        SaveFlags.__post_init__(self)

    def run(self) -> dict[str, Any]:
        """Train, showing progress; what came of it."""
        self.use_threads()
        run = self._run_folder()
        cache = self.cache_size(self._count() if self.counts_first else 0)
        embeddings = self.embeddings(cache, resume=self.resume)
        model, dense = self.model_over(embeddings)
        rates, meter, stream = self.rates(embeddings, dense), Meter(), self.stream()
        evaluation = Evaluation(every=self.eval_every, patience=self.patience)
        whole = {"model": model, "optimizers": [dense, rates, meter, evaluation, run]}
        with (
            self.lookahead(model, stream, trace=self.trace) as batches,
            Keeper(self, **whole, data=batches) as keeper,
            self._progress("train") as progress,
            run.begin(batches, meter),
        ):
            keeper.begin()
            for done in () if evaluation.stops else steps(model, dense, batches, rates):
                meter.add(done.loss_tensor, done.logits, done.batch.labels)
                last = batches.step == stream.steps
                if stream.held_out and evaluation.due(batches.step, last=last):
                    held_out = stream.held_out_at(batches.state_dict()["loader"])
                    with meter.paused():
                        evaluation.run(batches.step, model, held_out or ())
                last = last or evaluation.stops
                run.after_step(batches, meter, rates.now, last=last, evaluation=evaluation)
                progress(batches.step, lambda: meter.facts(batches))
                if keeper.after_step(last=last) or evaluation.stops:
                    break
            result = self._result(meter, evaluation, batches, run.begun_at, stream.bad_rows)
            result |= {"run": run.path, "checkpoints": keeper.facts()}
            run.finish(result)
        embeddings.close()
        return result

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        rows, loss, moved = result["rows"], result["loss"], result["counters"]
        done = result["steps"] - result["begun_at"]
        share = f", {rows['touched'] / rows['cache']:.1f} times the cache" if rows["cache"] else ""
        wide = self.model_class.row_dim(self.dim)
        numbers = f"{wide}" if wide == self.dim else f"{wide} ({self.dim} and a first-order weight)"
        lines = {
            "time": f"{clock(result['seconds'])} for {done:,} steps of {self.batch:,} samples",
            "speed": f"{result['samples_per_second']:,.0f} samples/s after the first step",
            "loss": f"{loss['first']:.4f} at first, {loss['last']:.4f} at last, {loss['mean']:.4f} on average",
            "metrics": f"{described(result)} of all predictions, each made before its sample was trained on",
            "tables": f"{rows['tables']:,} rows of {numbers}, {size(rows['bytes_of_all'])} with their state",
            "touched": f"{rows['touched']:,} rows{share}",
            "cache": f"{rows['cache']:,} rows, {size(result['cache_bytes'])}, {rows['in_cache']:,} filled",
            "staging": f"room for {rows['staging']:,} rows on their way, {size(result['staging_bytes'])} beside the cache",
            "fetched": f"{moved['fetched']:,} rows again, {moved['forwarded']:,} of them out of a pending write",
            "new": f"{moved['new']:,} rows made where they were needed",
            "written": f"{moved['written']:,} rows, {size(moved['bytes_written'])}",
            "hidden": f"{result['movement']['hidden']:.0%} of the movement",
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
        }
        if "test_samples" in result:
            lines["test"] = f"{described(result, 'test_')} on {result['test_samples']:,} samples held out"
        if result["stopped_early"]:
            lines["stopped"] = f"early, after {self.patience} evaluations without a better test log loss"
        if result["run"]:
            lines["run"] = f"{result['run']}; tensorboard --logdir {Path(result['run']).parent}"
        if self.trace:
            lines["timeline"] = f"{self.trace}; open it in https://ui.perfetto.dev"
        if self.save:
            kept = result["checkpoints"]
            lines["saved"] = (
                f"step {result['steps']:,} in {self.save}; more --steps and --resume go on from there\n"
                f"{kept['count']} checkpoints, {size(kept['bytes'])}; "
                f"training stood still {kept['pause_share']:.1%} of the time"
            )
            if kept["stopped_by"]:
                lines["told to stop"] = f"by {kept['stopped_by']}, after the step it was in"
        if result["bad_rows_skipped"]:
            lines["skipped"] = f"{result['bad_rows_skipped']:,} malformed rows"
        if self.assert_ratio is not None and not result["failed"]:
            lines["asserted"] = (
                f"{rows['touched']:,} touched rows are at least {self.assert_ratio:g} x {rows['cache']:,} rows of cache,\n"
                f"and {moved['fetched']:,} rows were fetched again"
            )
        return lines

    def _run_folder(self) -> RunFolder:
        name = f"{self.model}-{self.kind}"
        return RunFolder(
            self.chosen(), name=name, flags=self._flags(), every=self.log_every, wandb=self.wandb, resume=self.resume
        )

    def _flags(self) -> dict[str, Any]:
        """The flags by name, as JSON can hold them."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    def _progress(self, title: str) -> Progress:
        return Progress(title, steps=self.stream().steps, to=sys.stderr if self.json else sys.stdout, quiet=self.quiet)

    def _count(self) -> int:
        """A pass over the ids: how many rows the run will touch."""
        touched = Touched(self.tables())
        with self._progress("count rows") as progress:
            for number, batch in enumerate(self.stream(), start=1):
                touched.add(batch.sparse)
                progress(number, lambda: {"touched": f"{touched.rows:,}"})
        return touched.rows

    def _result(
        self, meter: Meter, evaluation: Evaluation, batches: Lookahead, begun: int, bad_rows: int
    ) -> dict[str, Any]:
        engine, times = batches.engine, batches.times
        widths = {t: engine.held[i] for i, bank in enumerate(engine.schema.banks) for t in bank.tables}
        rows = {
            "tables": sum(table.rows for table in engine.schema.tables),
            "touched": len(engine.seen),
            "cache": sum(len(cache) for cache in engine.caches),
            "in_cache": sum(cache.filled for cache in engine.caches),
            "staging": sum(size.staging_rows for size in engine.sizes()),
        }
        rows["bytes_of_all"] = sum(
            table.rows * widths[t] * engine.dtype.itemsize for t, table in enumerate(engine.schema.tables)
        )
        return {
            "command": "train",
            **self._flags(),
            **meter.result(),
            **evaluation.result(),
            "stopped_early": evaluation.stops,
            "steps": batches.step,
            "begun_at": begun,
            "rows": rows,
            "cache_bytes": sum(cache.records.nbytes for cache in engine.caches),
            "staging_bytes": sum(size.staging_rows * size.record_bytes for size in engine.sizes()),
            "counters": asdict(engine.counters),
            "movement": {"hidden": times.hidden, "stall": times.stall, "read": times.read, "busy": times.busy},
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "bad_rows_skipped": bad_rows,
            "failed": self._failure(rows, engine.counters.fetched),
        }

    def _failure(self, rows: dict[str, int], fetched: int) -> str | None:
        if self.assert_ratio is None:
            return None
        if rows["touched"] < self.assert_ratio * rows["cache"]:
            return (
                f"{rows['touched']:,} rows were touched, less than {self.assert_ratio:g} x the cache of {rows['cache']:,}: "
                "use a smaller --cache or more --steps"
            )
        return None if fetched else "no row was fetched again: use a smaller --cache or more --steps"


def described(result: Mapping[str, Any], prefix: str = "") -> str:
    """The metrics of a result as people read them.

    >>> described({"auc": 0.75, "logloss": 0.5, "ne": None, "calibration": 1.0})
    'AUC 0.7500, log loss 0.5000, NE none yet, calibration 1.0000'
    """
    names = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}
    values = {text: result[prefix + name] for name, text in names.items()}
    return ", ".join(f"{text} " + ("none yet" if v is None else f"{v:.4f}") for text, v in values.items())
