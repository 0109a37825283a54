"""`skirl size`: its flags and its output."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.tools.flags import Composed
from skirl.tools.progress import size
from skirl.tools.units import Link
from skirl.train.flags import MovementFlags, OptimizerFlags, ShowFlags


@dataclass(frozen=True)
class Size(Composed):
    """Find out how much cache a run needs.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 20, "quiet": True}
    >>> result = Size.of(**flags).run()
    >>> result["curves"]["LRU"][0]["moved"] >= result["curves"]["least (whole run known)"][0]["moved"]
    True
    >>> result["sentence"].startswith("Use --cache ")
    True
    """

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = ("data", "model", "dim", "batch", "steps", "optimizer", "link", "step_ms")
    positional: ClassVar[str] = "data"
    """The flag that may be given without its name."""
    example: ClassVar[str] = "skirl size synthetic:avazu --model dlrm-tiny --dim 16 --batch 1024 --steps 50"
    """A command line to begin with, shown if no data is given."""

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    movement: MovementFlags = field(default_factory=MovementFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    link: str | None = None
    """Rate and delay of the way between cache and store, such as 1Gbit,100us."""
    step_ms: float | None = None
    """Milliseconds that a step computes; with --link, the advice is the smallest cache with which the link keeps up."""

    def __post_init__(self) -> None:
        self.data.stream().tables(self.model.row_dim)  # checks dim
        if self.link is not None:
            Link.parse(self.link)
        if self.step_ms is not None and not 0 < self.step_ms < float("inf"):
            raise ValueError(f"step_ms is {self.step_ms}: set it to milliseconds above 0")

    def run(self) -> dict[str, Any]:
        from skirl.sizing.size import Sizing

        return Sizing(self.data, self.model, self.optimizer, self.movement, self.show, self.link, self.step_ms).answer()

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        used = max(1, result["used"])
        lines = {
            "data": f"{result['ids']:,} ids in {result['steps']:,} batches of {self.data.batch:,} samples",
            "touched": f"{result['touched']:,} of {result['rows']:,} rows, {size(result['bytes']['touched'])} of "
            f"{size(result['bytes']['all'])}",
            "a batch": f"{result['used'] / result['steps']:,.0f} distinct rows on average, {result['largest']:,} at most",
            "least cache": f"--cache {result['least_cache']} holds every batch, and so does {result['least_cache_bytes']}B, "
            "of which staging takes up to half",
            "moved": "rows brought in again, of those that batches use",
        }
        lines["cache"] = "\n".join(_grid(result["curves"], used))
        tiers = result["bytes"]
        lines["device"] = f"{size(tiers['cache'])} of cache, {size(tiers['staging'])} of staging"
        lines["memory"] = f"{size(tiers['planner'])} for the window; {size(tiers['touched'])} more with --store memory"
        lines["disk"] = (
            f"{size(tiers['disk'])} with --store disk:FOLDER, and {size(tiers['index'])} of memory for its index"
        )
        if result["step_ms_that_hides"] is not None:
            lines["link"] = f"keeps up if a step computes for {result['step_ms_that_hides']:.2f} ms or more"
        lines["advice"] = result["sentence"]
        return lines


def _grid(found: dict[str, list[dict[str, float]]], used: int) -> list[str]:
    """Return the curves as text, with a line for each cache."""
    from skirl.sizing.curve import KINDS, LEAST

    names = {LEAST: "least"} | {name: name for name in KINDS if name != LEAST}
    lines = [f"{'rows':>12}  " + "  ".join(f"{short:>9}" for short in names.values())]
    for i, point in enumerate(found[LEAST]):
        shares = "  ".join(f"{found[name][i]['moved'] / used:>9.2%}" for name in names)
        lines.append(f"{point['cache']:>12,}  {shares}")
    return lines
