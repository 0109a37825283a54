"""`skirl bench sweep`: what several variants on one stream save."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.measure.bench.helpers import at_least_one, result
from skirl.tools.flags import Composed
from skirl.train.flags import ShowFlags
from skirl.train.recipe import Recipe

Part = Literal["race", "speed"]


@dataclass(frozen=True)
class SweepBench(Composed):
    """What a race of variants saves: trained to the end once for the truth, then raced over the same losses."""

    group: ClassVar[str] = "sweep"
    common: ClassVar[tuple[str, ...]] = ("part", "data", "model", "dim", "batch", "steps", "variants", "races", "alpha")
    defaults: ClassVar[Mapping[str, Any]] = {
        "model": "dlrm-tiny",
        "dim": 8,
        "batch": 128,
        "cache": "100%",
        "threads": 1,
    }

    recipe: Recipe = field(default_factory=Recipe)
    show: ShowFlags = field(default_factory=ShowFlags)
    part: tuple[Part, ...] = ("race",)
    """race: cost and regret of a race of 16 and of 32 variants, and how often simulated ones drop the best. speed: variants
    on one stream beside lone runs, one after the other and as many at a time as cores."""
    variants: tuple[int, ...] = (16, 32)
    """Of which races."""
    races: int = 10_000
    """Simulated ones, of each kind of noise."""
    alpha: float = 0.05
    """The probability of an error that a deficit is taken for sure at."""
    losses: Path | None = None
    """A .npz file that the losses of all variants are kept in; where it is there, they are read and nothing is trained."""

    together: int = 8
    """For speed: how many variants train on one stream."""
    models: tuple[str, ...] = ("dlrm-tiny", "wide-deep-tiny", "deepfm-tiny", "dcnv2-tiny")
    """For speed: with each of these models,"""
    batches: tuple[int, ...] = (128, 512, 2048)
    """batch sizes"""
    stores: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")
    """and stores."""
    timed: int = 30
    """For speed: steps of each run that are timed, after as many that warm up."""
    repeats: int = 3
    """For speed: runs of each; medians count."""

    def __post_init__(self) -> None:
        at_least_one(self, "races", "together", "timed", "repeats")
        if not self.variants or set(self.variants) - {16, 32}:
            raise ValueError(f"variants is {' '.join(map(str, self.variants))}: set it to 16, 32 or both")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}: set it to a probability above 0 and below 1")
        if self.losses is not None and self.losses.suffix != ".npz":
            raise ValueError(f"losses is {str(self.losses)!r}: set it to a .npz file")

    def run(self) -> dict[str, Any]:
        """Measure each part."""
        found: dict[str, Any] = {}
        for part in self.part:
            found |= getattr(self, f"_{part}")()
        return result("sweep", self, "part races alpha", **found, trained_with=self.recipe.flat())

    def _speed(self) -> dict[str, Any]:
        from skirl.sweep.bench_speed import speed

        return speed(
            self.recipe, variants=self.together, models=self.models, batches=self.batches, stores=self.stores,
            steps=self.timed, repeats=self.repeats,
        )  # fmt: skip

    def _race(self) -> dict[str, Any]:
        from skirl.sweep.bench_race import grid, kept, paired_gain, replayed, rules_of, seed_noise
        from skirl.sweep.simulated import worst

        variants = grid(self.recipe, max(self.variants))
        truth = kept(self.losses, self.recipe, variants)
        figures: dict[str, Any] = {}
        for count in sorted(self.variants):
            part = truth.of([v.name for v in grid(self.recipe, count)[:count]])
            batches = part.losses.shape[1]
            raced = replayed(part, rules_of(count, batches, self.alpha))
            only_sure = replayed(part, rules_of(count, batches, self.alpha).without_rungs())
            end = "" if count == 16 else f"_{count}"
            figures |= {f"{name}{end}": value for name, value in raced.items()}
            figures |= {f"{name}{end}_sure": value for name, value in only_sure.items()}
        simulated = worst(self.races, alpha=self.alpha)
        return {
            **figures,
            "seed_noise": seed_noise(truth),
            "paired_gain": paired_gain(truth),
            "wrong": max(simulated.values()),
            "wrong_by_noise": simulated,
            "batches": truth.losses.shape[1],
            "trained_seconds": truth.seconds,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        lines = self._summary_of_speed(result) if "speed" in self.part else {}
        if "race" not in self.part:
            return lines
        for count, end in ((16, ""), (32, "_32")):
            if f"cost{end}" not in result:
                continue
            lines[f"{count} variants"] = (
                f"{result[f'cost{end}']:.3f} of the steps of training all, {result[f'regret{end}']:.3%} above the best loss "
                f"({result[f'winner{end}']});\nwithout rungs {result[f'cost{end}_sure']:.3f} and "
                f"{result[f'regret{end}_sure']:.3%}"
            )
        lines["seed"] = f"{result['seed_noise']:.3%} of the loss between two seeds of one configuration"
        lines["paired"] = (
            f"{result['paired_gain']:.1f} times fewer batches than an unpaired test, at the median of pairs"
        )
        lines["wrong"] = (
            f"{result['wrong']:.4f} of simulated races drop the best, at alpha {self.alpha:g}: "
            + ", ".join(f"{kind} {share:.4f}" for kind, share in result["wrong_by_noise"].items())
        )
        return lines

    @staticmethod
    def _summary_of_speed(result: Mapping[str, Any]) -> dict[str, str]:
        found = {}
        for cell in result["cells"]:
            found[f"{cell['model']}, batch {cell['batch']}, {cell['store']}"] = (
                f"{cell['vs_lone']:.2f} times lone runs one after the other, {cell['vs_side_by_side']:.2f} times side by "
                f"side; {cell['cpu_vs_lone']:.2f} in CPU time ({cell['form']}; slowest / fastest {cell['spread']:.2f})"
            )
        means = f"{result['vs_lone']:.2f} and {result['vs_side_by_side']:.2f}, the least of all {result['least']:.2f}"
        cpu = f"{result['cpu_vs_lone']:.2f} in CPU time"
        return found | {"all": f"{means}; {cpu}; {result['variants']} variants, geometric means"}
