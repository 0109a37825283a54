"""The command `skirl sweep`: its flags and what it prints. The code that trains is imported only when it runs."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.cli.report import report, sweep_lines
from skirl.cli.show import ShowFlags, facts
from skirl.sweep.variants import KeepFlags, RaceFlags, Varied, check_store, variants_of
from skirl.tools.flags import Composed, parsed
from skirl.tools.os_errors import why
from skirl.tools.units import parse_bytes
from skirl.train.flags import EvaluationFlags, LogFlags, check_evaluated
from skirl.train.recipe import Recipe


@dataclass(frozen=True)
class SweepCommand(Composed):
    group: ClassVar[str] = "sweep"
    repeated: ClassVar[tuple[str, ...]] = ("vary",)
    defaults: ClassVar[Mapping[str, Any]] = {"threads": 1}  # bits depend on it
    hidden: ClassVar[tuple[str, ...]] = ("shards", "placement", "patience", "keep_best", "from_", "trace")
    """Those of single runs."""

    race: RaceFlags = field(default_factory=RaceFlags)
    recipe: Recipe = field(default_factory=Recipe)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    save: KeepFlags = field(default_factory=KeepFlags)
    log: LogFlags = field(default_factory=LogFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    vary: tuple[str, ...] = ()
    """A flag and its values, such as lr=0.01,0.02; given several times, every combination is a variant. Sizes of
    layers are joined by x: top=64x32,128x64."""
    variants: Path | None = None
    """A TOML file with a table for each variant; with --vary, each of them is combined with every combination."""
    inexact: bool = False
    """Compute variants of one architecture as one also where this changes their last bits, if it is faster. By default only
    where a probe finds the bits of lone runs; the result says which form was used, and whether it was exact."""
    memory: str | None = None
    """The most that dense weights, their states and a step of all variants may take, such as 8GiB, or auto: what is free.
    What does not fit is computed again, moved to the host, or trained in turns. If not given, there is no limit."""
    processes: int | Literal["auto"] = "auto"
    """Processes that train variants, each reading the stream; auto: for long sweeps, one for each core and two variants."""

    def __post_init__(self) -> None:
        check_store(self.recipe.cache.store)
        self.recipe.check_labels()
        check_evaluated(self.evaluation, valid=self.recipe.data.valid)
        epochs = self.recipe.data.epochs
        if epochs > 1 and self.recipe.data.valid is None:
            raise ValueError(
                f"epochs is {epochs}, and losses from the second on are of samples trained on before: set valid, such as 20%"
            )
        if epochs > 1 and self.race.rungs is not None and self.evaluation.eval_every is None:
            raise ValueError(
                f"rungs is {self.race.rungs!r} and epochs is {epochs}, so rungs compare held-out log losses: set eval_every"
            )
        if self.memory not in (None, "auto"):
            parsed("memory", self.memory, parse_bytes, "a size like 8GiB, or to auto")
        if self.processes != "auto" and self.processes < 1:
            raise ValueError(f"processes is {self.processes}: set it to 1 or more, or to auto")
        if self.race.keep > (most := len(self.made())):
            raise ValueError(f"keep is {self.race.keep}, more than the sweep has variants: set it to {most} or fewer")

    def made(self) -> list[Varied]:
        return variants_of(self.recipe, self.vary, self.variants)

    def ranks(self) -> int:
        """Return how many processes to launch: 1 for those of a job that has been launched."""
        from skirl.sweep.checkpoint import header_at
        from skirl.sweep.ranks import how_many

        if os.environ.get("WORLD_SIZE", "1") != "1" or self.processes == 1:
            return 1
        save = self.save.save if self.save.goes_on else None
        left = 0 if save is None else len(header_at(save)["left"])
        return how_many(self.processes, self.recipe, len(self.made()) - left)

    def run(self) -> dict[str, Any]:
        from skirl.sweep.run import run

        result = run(self.recipe, self.made(), self.race, self.save, self.log, self.flat(), self.evaluation)
        result["page"] = None
        if result["run"] and os.environ.get("RANK", "0") == "0":
            try:
                result["page"] = report(Path(result["run"]))["page"]
            except (OSError, ValueError) as error:
                result["missing"].append(f"the page is missing: {why(error)}")
        return result

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        ended = {"ended": "it had ended before: nothing was left to train"} if result["form"] is None else {}
        return sweep_lines(result) | facts(result, "page") | ended
