"""The commands of training: their flags and their output. The code that does the work is imported when they run."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from skirl.core.optimizer_names import OptimizerName
from skirl.tools.flags import Composed
from skirl.tools.progress import clock, course, figure, hidden, malformed, size
from skirl.train.flags import (
    EvaluationFlags,
    LogFlags,
    OptimizerFlags,
    SaveFlags,
    ShowFlags,
    check_evaluated,
)
from skirl.train.recipe import Recipe
from skirl.train.resume import told


@dataclass(frozen=True)
class Train(Composed):
    """Train a model whose tables are larger than the cache.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 20, "quiet": True}
    >>> result = Train.of(**flags, cache="touched:25%").run()
    >>> result["rows"]["touched"] >= 4 * result["rows"]["cache"], result["failed"]
    (True, None)
    """

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = (
        "data", "model", "dim", "batch", "steps", "optimizer", "lr", "cache", "save", "resume",
    )  # fmt: skip
    usual: ClassVar[tuple[str, ...]] = (
        "schema", "rows", "vocab", "valid", "epochs", "seed", "dense_lr", "schedule", "warmup", "store", "device", "threads",
        "eval_every", "patience", "save_every", "keep_best", "from_", "run", "json",
    )  # fmt: skip
    """Flags that help shows besides the common ones."""
    of_one_run: ClassVar[tuple[str, ...]] = (
        "run", "trace", "save", "save_every", "save_minutes", "keep", "keep_best", "resume", "json", "quiet",
    )  # fmt: skip
    """Flags that a repetition of a run does not take from its config.json, so that it does not write to the same places."""

    recipe: Recipe = field(default_factory=Recipe)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    save: SaveFlags = field(default_factory=SaveFlags)
    log: LogFlags = field(default_factory=LogFlags)
    show: ShowFlags = field(default_factory=ShowFlags)

    def __post_init__(self) -> None:
        self.recipe.check_labels()
        check_evaluated(self.evaluation, valid=self.recipe.data.valid, keep_best=self.save.keep_best)

    def run(self) -> dict[str, Any]:
        from skirl.train.loop import train

        with self.recipe.naming_cache():
            return train(self.recipe, self.evaluation, self.save, self.log, self.show, self.flat())

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        from skirl.train.report.lanes import as_lines

        rows, moved = result["rows"], result["counters"]
        done = result["steps"] - result["begun_at"]
        share = (
            f", {rows['touched'] / rows['cache']:,.1f} times the cache" if rows["touched"] > rows["cache"] > 0 else ""
        )
        data, dim = self.recipe.data, self.recipe.model.dim
        wide = self.recipe.model.row_dim
        numbers = f"{wide}" if wide == dim else f"{wide} ({dim} and a first-order weight)"
        lines = {
            "time": f"{clock(result['seconds'])} for {done:,} steps of {data.batch:,} samples",
            "speed": f"{result['samples_per_second']:,.0f} samples/s after the first step",
            "loss": course(result["loss"]),
            "metrics": f"{described(result)} of all predictions, each made before its batch was trained on",
            "tables": f"{rows['tables']:,} rows of {numbers}, {size(rows['bytes_of_all'])} with their state",
            "touched": f"{rows['touched']:,} rows{share}",
            "cache": f"{rows['cache']:,} rows, {size(result['cache_bytes'])}, {rows['in_cache']:,} filled",
            "staging": f"room for {rows['staging']:,} rows on their way, {size(result['staging_bytes'])} besides the cache",
            "fetched": f"{moved['fetched']:,} rows again, {moved['forwarded']:,} of them out of a pending write",
            "new": f"{moved['new']:,} rows made where they were needed",
            "written": f"{moved['written']:,} rows, {size(moved['bytes_written'])}",
            "hidden": hidden(result["movement"]["hidden"], moved["fetched"] + moved["written"]),
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
        }
        lines |= as_lines(result["by_trainer"])
        if "test_samples" in result:
            lines["test"] = f"{described(result, 'test_')} on {result['test_samples']:,} samples held out"
        if result["stopped_early"]:
            lines["stopped"] = f"early, after {self.evaluation.patience} evaluations without a better test log loss"
        if result["run"]:
            lines["run"] = f"{result['run']}; tensorboard --logdir {Path(result['run']).parent}"
        if self.log.trace:
            lines["timeline"] = f"{self.log.trace}; open it in https://ui.perfetto.dev"
        if self.save.save:
            kept = result["checkpoints"]
            lines["saved"] = (
                f"{saved_line(self.save, result)}\n"
                f"{kept['count']} checkpoint{'s' * (kept['count'] != 1)}, {size(kept['bytes'])}; "
                f"training was paused {kept['pause_share']:.1%} of the time"
            )
            if kept["stopped_by"]:
                again = "; launchers of several machines start the run again" if result["begins_again"] else ""
                lines["told to stop"] = f"by {kept['stopped_by']}, after the step it was in{again}"
        lines |= outcome(result)
        if result["bad_rows_skipped"]:
            lines["skipped"] = malformed(result["bad_rows_skipped"], result["first_bad_row"])
        if (ended := nothing_left(result, data.steps)) is not None:
            kept = ("loss", "metrics", "test", "run", "best", "missing")
            return {"ended": ended} | {name: lines[name] for name in kept if name in lines}
        return lines


@dataclass(frozen=True)
class Verify(Composed):
    """Train with a cache, with every row resident, and in plain Python, and compare every bit.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 8, "steps": 20, "quiet": True}
    >>> [(run["optimizer"], run["difference"]) for run in Verify.of(**flags).run()["runs"]]
    [('rowwise-adagrad', None)]
    """

    group: ClassVar[str] = "learning"
    common: ClassVar[tuple[str, ...]] = ("data", "model", "dim", "batch", "steps", "optimizer", "lr", "cache")
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "dlrm-tiny", "dim": 16, "batch": 256, "steps": 30, "cache": "touched:10%",
    }  # fmt: skip

    recipe: Recipe = field(default_factory=Recipe)
    show: ShowFlags = field(default_factory=ShowFlags)
    optimizer: OptimizerName | Literal["all"] = "rowwise-adagrad"
    """The optimizer of the rows; dense weights use Adam. all: each optimizer in turn."""
    trainers: str | None = None
    """Numbers of trainers, such as 1,2,4: train with each, with three caches and depths, with both stores, and with
    late trainers."""

    def __post_init__(self) -> None:
        most = max(self.sizes(), default=1)
        if self.recipe.step.shards < most:
            raise ValueError(
                f"trainers is {self.trainers!r} and shards is {self.recipe.step.shards}: set shards to a power of two of "
                f"{most} or more"
            )
        if self.recipe.device.dtype != "float32":
            raise ValueError(
                f"dtype is {self.recipe.device.dtype!r}: the reference rounds nothing to 16 bits, leave dtype out"
            )
        self.recipe.check_labels()

    def run(self) -> dict[str, Any]:
        if self.trainers is not None and self.recipe.device.threads is None:
            return self._with_threads_of_trainers().run()
        from skirl.tools.machine import machine
        from skirl.train.verify import touched_rows, verify

        self.recipe.use_threads()
        touched = touched_rows(self.recipe)
        with self.recipe.naming_cache():
            if self.trainers is not None:
                return self._with_trainers(touched)
            runs = [verify(recipe, touched, self.show) for recipe in self.recipes()]
        differences = [f"{run['optimizer']}: {run['difference']['text']}" for run in runs if run["difference"]]
        return {
            "command": "verify",
            **self.flat(),
            "touched": touched,
            "runs": runs,
            "machine": machine(),
            "failed": "\n".join(differences) or None,
        }

    def _with_threads_of_trainers(self) -> "Verify":
        """Return the same command with as many threads as trainers have by default: bits depend on their number."""
        text = os.environ.get("OMP_NUM_THREADS", "1")
        threads = text.partition(",")[0].strip()  # after a comma, threads of loops in loops, which torch does not have
        if not threads.isdecimal() or not int(threads):
            raise ValueError(f"OMP_NUM_THREADS is {text!r}: set it to a number from 1 on, or unset it")
        device = replace(self.recipe.device, threads=int(threads))
        return replace(self, recipe=replace(self.recipe, device=device))

    def sizes(self) -> list[int]:
        words = [] if self.trainers is None else self.trainers.split(",")
        if not all(word.strip().isdecimal() and 0 < int(word) <= 64 for word in words):
            raise ValueError(
                f"trainers is {self.trainers!r}: set it to numbers from 1 to 64 with commas between, as 1,2,4"
            )
        return [int(word) for word in words]

    def _with_trainers(self, touched: int) -> dict[str, Any]:
        from skirl.tools.machine import machine
        from skirl.train.verify_trainers import STORES, verify_trainers

        least, store = self.recipe.cache_size(touched), self.recipe.cache.store
        if not isinstance(least, int):
            raise ValueError(f"cache is {least!r}: with trainers, set it to rows or a share of the touched rows")
        names = [recipe.optimizer.optimizer for recipe in self.recipes()]
        stores = (store,) if store.startswith("rpc:") else STORES
        caches = [least, 2 * least, max(touched, least)]
        found = verify_trainers(self.recipe, self.sizes(), names, caches, self.show, stores)
        first = found["first"]
        failed = None if first is None else f"{found['differences']} of {found['runs']} runs differ: {first}"
        return {"command": "verify", **self.flat(), "touched": touched, **found, "machine": machine(), "failed": failed}

    def recipes(self) -> list[Recipe]:
        """Return a recipe for each optimizer. On disk, each has a folder of its own if there are several."""
        if self.optimizer != "all":
            return [replace(self.recipe, optimizer=OptimizerFlags(self.optimizer))]
        from skirl.store.specs import inside

        cache = self.recipe.cache
        return [
            replace(
                self.recipe,
                optimizer=OptimizerFlags(name),
                cache=replace(cache, store=inside(cache.store, name)),
            )
            for name in get_args(OptimizerName)
        ]

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = {}
        if self.trainers is not None:
            equal = "equal, bit for bit" if not result["differences"] else f"{result['differences']:,} DIFFERENT"
            return {f"{self.trainers} trainers": f"{equal}: {result['runs']:,} runs of {result['steps']:,} steps, "
                    f"{result['fetched']:,} rows fetched again ({clock(result['seconds'])})"}  # fmt: skip
        for run in result["runs"]:
            moved, dense = run["moved"], run["dense"]
            lines[run["optimizer"]] = "\n".join(
                [
                    f"{'DIFFERENT' if run['difference'] else 'equal, bit for bit'} ({clock(run['seconds'])})",
                    f"{run['losses']:,} losses",
                    f"{dense['parameters']} dense parameters of {dense['numbers']:,} numbers, after every step",
                    f"{run['rows']:,} rows of {run['width']} numbers with their state, at the end",
                    f"{run['uses']:,} rows before and after a step that used them",
                    f"through a cache of {run['cache']:,} rows: {moved['new']:,} new, {moved['written']:,} written, "
                    f"{moved['fetched']:,} fetched again, {moved['forwarded']:,} of them out of a pending write",
                ]
                + ([] if moved["fetched"] else ["no row was fetched again: use a smaller --cache or more --steps"])
            )
        return lines


def described(result: Mapping[str, Any], prefix: str = "") -> str:
    """Return the metrics of a result as text.

    >>> described({"auc": 0.75, "logloss": 0.5, "ne": None, "calibration": 1.0})
    'AUC 0.7500, log loss 0.5000, NE none yet, calibration 1.0000'
    """
    names = {"auc": "AUC", "logloss": "log loss", "ne": "NE", "calibration": "calibration"}
    values = {text: result[prefix + name] for name, text in names.items()}
    return ", ".join(f"{text} " + ("none yet" if v is None else figure(v)) for text, v in values.items())


@dataclass(frozen=True)
class Chosen:
    """A saved run, and what it is to predict. Flags that are not given are as in the run."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "files": ("schema", "vocab", "workers", "bad_rows"),
        "device": ("device", "threads"),
        "output": ("json", "quiet"),
    }

    common: ClassVar[tuple[str, ...]] = ("data", "save", "into", "held_out", "valid")

    _: KW_ONLY
    save: Path
    """The folder that `skirl train --save` wrote, to use its newest whole checkpoint, or the header of one
    checkpoint."""
    data: str | None = None
    """The data to predict, as for `skirl train`: criteo:, avazu:, mind:, csv: or parquet:PATH; the run's data if not
    given."""
    held_out: bool = False
    """Use only the part that the run held out of its training."""
    valid: str | None = None
    """Use only the part that this would hold out: 20% (the last rows in order), or a time: time>=14102900,
    time>=2026-03-01."""
    schema: str | None = None
    """A TOML file that names the columns; if not given, the run's, or the one inside a converted file."""
    vocab: str | None = None
    """Where the run's vocabulary is now, if it has moved."""
    batch: int | None = None
    """Samples in a batch; as in the run if not given, since the last bits of a prediction may depend on it."""
    workers: int | None = None
    """Processes that read files; as in the run if not given."""
    bad_rows: Literal["refuse", "skip"] | None = None
    """Treatment of malformed rows: refuse the data, or leave the row out; as in the run if not given."""
    device: str | None = None
    """Where the model computes: cpu, cuda or cuda:N; as in the run if not given."""
    threads: int | None = None
    """Compute threads; as in the run if not given, since the last bits of a prediction may depend on it."""
    json: bool = False
    """Print the results as one line of JSON; progress goes to standard error."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        if self.held_out and self.valid is not None:
            raise ValueError(
                "--held-out is the part that the run held out, and --valid another one: set one of the two"
            )
        if self.data is None and not self.held_out and self.valid is None:
            raise ValueError(
                "nothing says what to predict: set --data, or --held-out for the samples that the run held out"
            )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = {
            "checkpoint": f"{result['checkpoint']}, after step {result['step']:,}",
            "samples": f"{result['samples']:,} of {result['data']}"
            + (f", those that --valid {result['part']} holds out" if result["part"] else ""),
        }
        if "auc" in result:
            lines["metrics"] = described(result)
        if (rate := result["samples_per_second"]) is not None:
            lines["speed"] = (
                f"{rate:,.0f} samples/s and {result['cpu_us_per_sample']:.1f} us of CPU each after the first batch, "
                f"{clock(result['seconds'])} in all"
            )
        if result["bad_rows_skipped"]:
            lines["skipped"] = f"{result['bad_rows_skipped']:,} malformed rows"
        if result["into"] is not None:
            lines["written"] = f"{result['into']}, {size(result['bytes'])}"
        return lines


@dataclass(frozen=True)
class Evaluate(Chosen):
    """Compare the predictions of a trained model with labels."""

    def run(self) -> dict[str, Any]:
        from skirl.train.predict import evaluate

        return evaluate(self)


@dataclass(frozen=True)
class Predict(Chosen):
    """Write the predictions of a trained model to a Parquet file."""

    _: KW_ONLY
    into: Path
    """The file to write; an existing one is replaced when the new one is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.into.suffix not in (".parquet", ".pq"):
            raise ValueError(f"--into is {self.into}: name a file that ends with .parquet")
        if not self.into.absolute().parent.is_dir():
            raise ValueError(f"--into is {self.into}: its folder does not exist, make it first")

    def run(self) -> dict[str, Any]:
        from skirl.train.predict import predict

        return predict(self, self.into)


def saved_line(saving: SaveFlags, result: Mapping[str, Any]) -> str:
    kept, folder = result["checkpoints"], saving.save
    newest = kept["newest"]
    first = "nothing" if newest is None else f"step {newest:,} in {folder}; more --steps and --resume go on from there"
    lines = [first]
    if kept["failed"]:
        lines.append(f"{kept['failed']} more could not be written: {kept['last_failure']}")
    return "\n".join(lines)


def nothing_left(result: Mapping[str, Any], steps: int | None) -> str | None:
    """Return what the summary says of a resumed run that had no step left to train; None if it trained."""
    at = result["steps"]
    if not at or result["begun_at"] < at:
        return None
    past = steps is not None and at > steps
    how = f"is past --steps {steps}," if past else "had stopped early" if result["stopped_early"] else "had ended"
    return f"the run {how} at step {at:,}: nothing was left to train"


def origin_line(begun: Mapping[str, Any]) -> str:
    state = "with their optimizer's state" if begun["row_state"] else "whose optimizer's state starts from zero"
    return f"with {begun['rows']:,} rows out of {begun['folder']}, {state}"


def outcome(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the summary's lines on the best checkpoint, the run's origin, changed flags, and what is missing."""
    lines = {}
    if (best_one := result["best"]) is not None:
        loss = best_one["test_logloss"]
        scored = "" if loss is None else f", log loss {loss:.4f} on the samples held out"
        lines["best"] = f"step {best_one['step']:,}{scored}, in {best_one['folder']}"
    if (begun := result["from"]) is not None:
        lines["begun"] = origin_line(begun)
    if result["changes"]:
        lines["changed"] = "\n".join(told(result["changes"]))
    if result["missing"]:
        lines["missing"] = "\n".join(result["missing"])
    return lines
