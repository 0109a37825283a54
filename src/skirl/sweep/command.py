"""The command `skirl sweep`: its flags and what it prints. The code that trains is imported only when it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from skirl.sweep.flags import JudgeFlags, KeepFlags, RaceFlags, SweepRecipe, VaryFlags
from skirl.sweep.variants import Varied, variants_of
from skirl.tools.flags import Composed
from skirl.tools.progress import clock, size
from skirl.train.flags import LogFlags, ShowFlags, check_evaluated


@dataclass(frozen=True)
class SweepCommand(Composed):
    """Train several variants of a model on one stream, and drop the worse half at each rung.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 20, "quiet": True}
    >>> result = SweepCommand.of(**flags, vary=("lr=0.01,0.02", "seed=0,1"), run="none").run()
    >>> result["failed"], len(result["standing"]), result["plans"]
    (None, 4, 20)
    """

    group: ClassVar[str] = "sweep"
    repeated: ClassVar[tuple[str, ...]] = ("vary",)
    common: ClassVar[tuple[str, ...]] = ("data", "model", "dim", "batch", "steps", "vary", "rungs", "cache")
    hidden: ClassVar[tuple[str, ...]] = ("shards", "peer_patience")  # a sweep has one trainer and many runs
    of_one_run: ClassVar[tuple[str, ...]] = (
        "run", "trace", "save", "save_every", "save_minutes", "keep_best", "resume", "json", "quiet",
    )  # fmt: skip

    vary: VaryFlags = field(default_factory=VaryFlags)
    race: RaceFlags = field(default_factory=RaceFlags)
    recipe: SweepRecipe = field(default_factory=SweepRecipe)
    evaluation: JudgeFlags = field(default_factory=JudgeFlags)
    save: KeepFlags = field(default_factory=KeepFlags)
    log: LogFlags = field(default_factory=LogFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    log_every: int | None = None
    """Steps between two lines of metrics and of the standing; by default chosen to give 100 to 200 lines."""
    processes: int | Literal["auto"] = "auto"
    """Processes that train variants, each reading the stream for itself; auto: one for each core and at least two
    variants, if the sweep takes more than some seconds."""

    def __post_init__(self) -> None:
        self.recipe.check_labels()
        check_evaluated(self.evaluation, valid=self.recipe.data.valid, keep_best=self.save.keep_best)
        epochs = self.recipe.data.epochs
        if epochs > 1 and self.recipe.data.valid is None:
            raise ValueError(
                f"epochs is {epochs}, and losses from the second on are of samples that variants have trained on, which do "
                "not tell the best from one that learnt them by heart: set valid, such as 20%"
            )
        if epochs > 1 and self.race.rungs is not None and self.evaluation.eval_every is None:
            raise ValueError(
                f"rungs is {self.race.rungs!r} and epochs is {epochs}: from the second epoch on, rungs compare log losses "
                "on the samples held out, so set eval_every"
            )
        if self.log_every is not None and self.log_every < 1:
            raise ValueError(f"log_every is {self.log_every}: set it to 1 or more steps")
        if self.processes != "auto" and self.processes < 1:
            raise ValueError(f"processes is {self.processes}: set it to 1 or more, or to auto")
        if self.recipe.step.shards > 1:
            raise ValueError(
                f"shards is {self.recipe.step.shards}, but a sweep's steps have one shard: leave shards out"
            )
        self.made()

    def made(self) -> list[Varied]:
        """Return the variants."""
        return variants_of(self.recipe, self.vary.vary, self.vary.variants)

    def run(self) -> dict[str, Any]:
        device = self.recipe.device
        if device.threads is None:  # bits depend on the thread count, so it is written down
            return replace(self, recipe=replace(self.recipe, device=replace(device, threads=1))).run()
        self._check_saved()
        from skirl.sweep.run import run

        with self.recipe.naming_cache():
            return run(
                self.recipe, self.made(), self.race, self.save, self.log, self.show, self.flat(),
                evaluation=self.evaluation, processes=self.processes,
            )  # fmt: skip

    def _check_saved(self) -> None:
        """Raise if the sweep resumes from a checkpoint with other flags."""
        if not self.save.goes_on or self.save.save is None:
            return
        from skirl.sweep.checkpoint import check_same, saved_with

        check_same(saved_with(self.save.save), self.flat())

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        from skirl.sweep.race import VariantPlace
        from skirl.sweep.report import MEANS, SAME, best_line, table_text
        from skirl.train.commands import origin_line

        count = result["processes_used"]
        shared = "once for all variants" if count == 1 else f"once in each of {count} processes for its variants"
        aucs = {place["variant"]: place["auc"] for place in result["standing"]}
        places = [VariantPlace(**{k: v for k, v in place.items() if k != "auc"}) for place in result["standing"]]
        lines = {
            "time": f"{clock(result['seconds'])} for {result['steps']:,} steps of {self.recipe.data.batch:,} samples",
            "speed": f"{result['samples_per_second']:,.0f} samples/s of the stream, each used by every variant in the race",
            "read": f"{result['read_batches']:,} batches, {shared}{self._not_planned(result)}",
            "trained": f"{result['variant_steps']:,} steps of variants"
            + ("" if result["cost"] is None else f", {result['cost']:.0%} of training all to the end"),
            "race": table_text(places, aucs) + (f"\n{MEANS}" if result["seed_noise"] is not None else ""),
        }
        if result["winner"]:
            lines["winner"] = best_line(places[0], result["best"])
        stopped = [of for of in result["by_variant"].values() if of.get("stopped_early") and of["left"]]
        if stopped:
            lines["stopped"] = (
                f"{len(stopped):,} of {len(result['by_variant']):,} variants, whose own test log loss no longer got better"
            )
        if (begun := result["from"]) is not None:
            lines["begun"] = origin_line(begun)
            if zero := result["from_zero"]:
                lines["begun"] += f"; it starts from zero for {', '.join(zero)}"
        if result["seed_noise"] is not None:
            noise = f"{result['seed_noise']:.5f}: a lead below that may be the seed's"
            lines["noise"] = noise + SAME * bool(result["from"])
        whole = "the whole process" if count == 1 else f"{count} processes in sum"
        lines["memory"] = f"{size(result['peak_bytes'])} at its peak, {whole}"
        if result["run"]:
            lines["run"] = f"{result['run']}; tensorboard --logdir {result['run']}"
            if result["page"]:
                lines["page"] = result["page"]
        if result["saved_step"] is not None and not result["failed"]:
            why = f"told to stop by {result['stopped_by']}; " if result["stopped_by"] else ""
            more = "--patience" if result["stopped_early"] else "--steps"
            lines["saved"] = (
                f"{why}step {result['saved_step']:,} in {result['save']}; more {more} and --resume go on from there"
            )
        if result["missing"]:
            lines["missing"] = "\n".join(result["missing"])
        return lines

    def _not_planned(self, result: Mapping[str, Any]) -> str:
        if result["plans"] == result["read_batches"]:
            return ""
        twice = self.recipe.cache.depth == "epoch"
        others = "all are read beforehand, too" if twice else "the others were read ahead when the sweep ended"
        return f"; {result['plans']:,} of them were planned, and {others}"
