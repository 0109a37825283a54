"""The commands of training: their flags and their output. The code that does the work is imported when they run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from skirl.cli.report import run_lines
from skirl.cli.show import ShowFlags, facts, scores
from skirl.peers.processes import launch
from skirl.tools.flags import Composed, check_out
from skirl.tools.machine import machine
from skirl.train.flags import EvaluationFlags, LogFlags, SavedFlags, SaveFlags, check_evaluated
from skirl.train.recipe import Recipe


@dataclass(frozen=True)
class Train(Composed):
    group: ClassVar[str] = "output"

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

        return train(self.recipe, self.evaluation, self.save, self.log, self.flat())

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines, at, steps = run_lines(result), result["steps"], self.recipe.data.steps
        if at and result["begun_at"] >= at:  # it was resumed
            shown = facts(lines, "test", "best", "loss", "metrics", "changed", "missing", "begun")
            return {"ended": f"the run had ended at step {at:,}: nothing was left to train"} | shown
        if steps is not None and at < steps and lines["run"].endswith("ended"):
            lines["steps"] += f"; the data has no more for --steps {steps:,}"
        return lines


@dataclass(frozen=True)
class Verify(Composed):
    """Train with a cache, with every row resident, and in plain Python, and compare every bit.

    With --cache auto, the cache is so small that rows are refetched and forwarded. Every stage is slow in turn, by --seed.
    """

    group: ClassVar[str] = "learning"
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "dlrm-tiny", "dim": 16, "batch": 256, "steps": 30, "cache": "auto",
    }  # fmt: skip

    recipe: Recipe = field(default_factory=Recipe)
    show: ShowFlags = field(default_factory=ShowFlags)
    trainers: str | None = None
    """Numbers of trainers, such as 1,2,4: train with each, with three caches and depths, and with both stores."""

    def __post_init__(self) -> None:
        if (shards := self.recipe.step.shards) < (most := max(self.sizes(), default=1)):
            raise ValueError(
                f"trainers is {self.trainers!r} and shards is {shards}: set shards to a power of two of {most} or more"
            )
        if self.recipe.device.dtype != "float32":
            raise ValueError(
                f"dtype is {self.recipe.device.dtype!r}: the reference rounds nothing to 16 bits, leave dtype out"
            )
        self.recipe.check_labels()

    def run(self) -> dict[str, Any]:
        from skirl.train.loop import touched_rows
        from skirl.train.verify import NOTHING_SHOWN, verify

        device = self.recipe.device
        if self.trainers is not None and device.threads is None:  # that of trainers, since bits depend on it
            return replace(self, recipe=replace(self.recipe, device=replace(device, threads=1))).run()
        self.recipe.use_threads()
        touched = touched_rows(self.recipe)
        if self.trainers is not None:
            found = self._with_trainers(touched)
        else:
            run = verify(self.recipe, touched)
            shown = None if run["moved"]["fetched"] else NOTHING_SHOWN
            found = {"runs": [run], "failed": run["difference"] or shown}
        return {**self.flat(), "touched": touched, "machine": machine(), **found}

    def sizes(self) -> list[int]:
        words = [] if self.trainers is None else self.trainers.split(",")
        if not all(word.strip().isdecimal() and 0 < int(word) <= 64 for word in words):
            raise ValueError(f"trainers is {self.trainers!r}: set it to numbers from 1 to 64, as 1,2,4")
        return [int(word) for word in words]

    def _with_trainers(self, touched: int) -> dict[str, Any]:
        from skirl.train.verify import NOTHING_SHOWN, cache_of
        from skirl.train.verify_trainers import STORES, verify_trainers

        least, store = cache_of(self.recipe, touched), self.recipe.cache.store
        if not isinstance(least, int):
            raise ValueError(f"cache is {least!r}: with trainers, set it to rows or a share of the touched rows")
        stores = (store,) if store.startswith("rpc:") else STORES
        caches = [least, 2 * least, max(touched, least)]
        found = verify_trainers(self.recipe, self.sizes(), caches, stores)
        if found["first"] is not None:
            return found | {"failed": f"{found['differences']} of {found['runs']} runs differ: {found['first']}"}
        return found | {"failed": None if found["fetched"] else NOTHING_SHOWN}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        equal = {True: "equal, bit for bit", False: "DIFFERENT"}
        if self.trainers is not None:
            found = facts(result, "runs", "differences", "first", "steps", "fetched", "seconds")
            return {f"{self.trainers} trainers": equal[not result["differences"]], **found}
        [run] = result["runs"]
        found = facts(run, "losses", "dense", "rows", "width", "cache", "moved", "seconds")
        return {run["optimizer"]: equal[not run["difference"]], **found}


@dataclass(frozen=True, kw_only=True)
class Evaluate(SavedFlags, ShowFlags):
    group: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...]] = ("checkpoint", "data")

    def run(self) -> dict[str, Any]:
        from skirl.train.predict import predict

        return predict(self, getattr(self, "out", None))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = facts(result, "checkpoint", "step", "data", "part", "samples")
        lines |= {"metrics": scores(result)} if "auc" in result else {}
        cost = ("samples_per_second", "seconds", "bad_rows_skipped", "out", "bytes")
        return lines | facts(result, *cost)


@dataclass(frozen=True, kw_only=True)
class Predict(Evaluate):
    out: Path
    """The Parquet file to write."""
    force: bool = False
    """Replace the file if it exists, once the new one is complete."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_out(self.out, self.force, ".parquet")


@dataclass
class Launch:
    """Start the trainers of one job on this machine. They end together, and when this command does.

    What they run follows after `--`: a command of skirl with its flags, or a Python file.
    """

    then: ClassVar[str] = " -- COMMAND [flags] | SCRIPT.py [arguments]"
    """What follows in the usage line."""

    trainers: int = 2
    """The number of trainers; -n for short."""
    restarts: int = 0
    """Number of times that all are restarted after one has failed; give the command --save and --resume."""

    def __post_init__(self) -> None:
        if self.trainers < 1:
            raise ValueError(f"trainers is {self.trainers}: set it to 1 or more")
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}: set it to 0 or more")
        self.words: list[str] = []  # after `--`

    def run(self) -> dict[str, Any]:
        from skirl.cli import main

        code, how, resumes = launch(main, self.words, self.trainers, self.restarts)
        if resumes and "--save" in self.words:
            how = f"{how}; --resume goes on"
        return {"exit_code": code, "failed": how}
