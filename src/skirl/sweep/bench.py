"""`skirl bench sweep`: measure what training several variants on one stream saves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.measure.bench.helpers import at_least_one, result
from skirl.tools.flags import Composed
from skirl.train.flags import ShowFlags
from skirl.train.recipe import Recipe

Part = Literal["race", "speed", "once", "exact", "pruners", "wall"]
_KEYS = ("bits_equal", "differences", "read_batches", "hashed_ids", "plans")
"""Keys of a part's result that are copied to the top level of the whole result."""


@dataclass(frozen=True)
class SweepBench(Composed):
    """Measure what a race of variants saves: train all to the end once for the truth, then race on those losses."""

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
    """race: cost and regret of races of 16 and 32 variants, and how often simulated races drop the best. pruners: Optuna's
    pruners on the same losses. wall: wall-clock time of a race against lone runs of all variants. speed: variants on one
    stream against lone runs, one after the other and one per core at a time. once: what is read, hashed and planned for 1,
    8 and 32 variants. exact: compare every bit of all models trained together, alone and in plain Python."""
    variants: tuple[int, ...] = (16, 32)
    """How many variants race: 16, 32 or both."""
    counts: tuple[int, ...] = (1, 8, 32)
    """For part once: numbers of variants to compare."""
    races: int = 10_000
    """Simulated races for each kind of noise."""
    alpha: float = 0.05
    """The highest probability that a variant is dropped by mistake."""
    losses: Path | None = None
    """A .npz file for the losses of all variants; if it exists, they are read from it and nothing is trained."""

    together: tuple[int, ...] = (8,)
    """For part speed: how many variants train on one stream; each number given is compared with the same lone runs."""
    models: tuple[str, ...] = ("dlrm-tiny", "wide-deep-tiny", "deepfm-tiny", "dcnv2-tiny")
    """For part speed: models to measure."""
    batches: tuple[int, ...] = (128, 512, 2048)
    """For part speed: batch sizes to measure."""
    stores: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")
    """For part speed: stores to measure."""
    timed: int = 30
    """For part speed: steps of a turn. At least as many come before the first one, to warm up."""
    processes: int | Literal["auto"] = "auto"
    """For part speed: processes that train the variants, as in `skirl sweep`."""
    repeats: int = 5
    """For part speed: turns of each run; medians are reported."""

    def __post_init__(self) -> None:
        at_least_one(self, "races", "timed", "repeats")
        if not self.together or min(self.together) < 1:
            raise ValueError(f"together is {' '.join(map(str, self.together))}: set it to numbers of 1 or more")
        if "pruners" in self.part and find_spec("optuna") is None:
            raise ValueError(
                "part has pruners, but Optuna is not installed: pip install 'skirl[sweep]', or leave pruners out"
            )
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"counts is {' '.join(map(str, self.counts))}: set it to numbers of 1 or more")
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
            own = getattr(self, f"_{part}")()
            found |= own if part in ("race", "speed") else {part: own} | {n: v for n, v in own.items() if n in _KEYS}
        return result("sweep", self, "part races alpha", **found, trained_with=self.recipe.flat())

    def _speed(self) -> dict[str, Any]:
        from skirl.sweep.bench_speed import speed

        return speed(
            self.recipe, variants=self.together, models=self.models, batches=self.batches, stores=self.stores,
            steps=self.timed, repeats=self.repeats, processes=self.processes,
        )  # fmt: skip

    def _once(self) -> dict[str, Any]:
        from skirl.sweep.bench_once import once

        return once(self.recipe, self.counts, self.timed)

    def _exact(self) -> dict[str, Any]:
        from skirl.sweep.bench_exact import exact

        return exact(self.recipe, self.timed)

    def _wall(self) -> dict[str, Any]:
        from skirl.sweep.bench_wall import wall

        return {str(count): wall(self.recipe, count, self.alpha) for count in sorted(self.variants)}

    def _pruners(self) -> dict[str, Any]:
        from skirl.sweep.bench_pruners import pruned
        from skirl.sweep.bench_race import grid, kept

        truth = kept(self.losses, self.recipe, grid(self.recipe, max(self.variants)))
        named = {n: [v.name for v in grid(self.recipe, n)[:n]] for n in sorted(self.variants)}
        return {str(count): pruned(truth.of(names)) for count, names in named.items()}

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
        """Return the result as lines of text, by title."""
        lines = self._summary_of_speed(result) if "speed" in self.part else {}
        if "once" in self.part:
            for one in result["once"]["by_variants"]:
                lines[f"{one['variants']} on one stream"] = (
                    f"{one['read_batches']:,} batches read with {one['read_ids']:,} ids, {one['hashed_ids']:,} hashed, "
                    f"{one['plans']:,} steps planned, for {one['variant_steps']:,} steps of variants"
                )
        if "exact" in self.part:
            for name, one in result["exact"]["sets"].items():
                lines[name] = (
                    f"{one['differences']:,} differences in {one['runs']:,} runs of {len(one['variants'])} variants, "
                    f"{one['fetched']:,} rows fetched again"
                )
        for count, one in result["wall"].items() if "wall" in self.part else ():
            lines[f"{count} on a clock"] = (
                f"{one['seconds']:.1f} s, lone runs of all {one['lone_of_all']:.1f} s: {one['sooner']:.1f} times sooner, "
                f"{one['less_cpu']:.1f} times less CPU"
            )
        for count, of in result["pruners"].items() if "pruners" in self.part else ():
            lines[f"pruners, {count}"] = "\n".join(
                f"{name.replace('_', ' ')}: {one['cost']:.3f} of the steps, {one['regret']:.3%} above the best loss"
                for name, one in of.items()
            )
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
            found[f"{cell['variants']} x {cell['model']}, batch {cell['batch']}, {cell['store']}"] = (
                f"{cell['vs_lone']:.2f} times lone runs one after the other, {cell['vs_side_by_side']:.2f} times side by "
                f"side; {cell['cpu_vs_lone']:.2f} in CPU time ({cell['form']}; slowest / fastest {cell['spread']:.2f})"
            )
        means = f"{result['vs_lone']:.2f} and {result['vs_side_by_side']:.2f}, the least of all {result['least']:.2f}"
        cpu = f"{result['cpu_vs_lone']:.2f} in CPU time"
        return found | {"all": f"{means}; {cpu}; geometric means"}
