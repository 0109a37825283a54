"""`skirl size`: its flags and its output."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from skirl.cli.show import ShowFlags, columns, facts
from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.tools.flags import Composed
from skirl.tools.units import Link
from skirl.train.flags import MovementFlags, OptimizerFlags


@dataclass(frozen=True)
class Size(Composed):
    """Find out how much cache a run needs."""

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = ("data", "model", "dim", "batch", "steps", "optimizer", "link", "step_ms")
    positional: ClassVar[tuple[str, ...]] = ("data",)
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
        from skirl.sizing.size import sized

        link, step = self.link and Link.parse(self.link), self.step_ms and self.step_ms / 1e3
        run = self.data, self.model.row_dim, self.optimizer.optimizer, self.movement.prefetch
        return {"command": "size", **self.flat(), **sized(*run, link or None, step)}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        from skirl.sizing.curve import KINDS, LEAST

        names = {LEAST: "least"} | {name: name for name in KINDS if name != LEAST}
        cells = [("rows", *names.values())]
        for i, point in enumerate(result["curves"][LEAST]):
            shares = (f"{result['curves'][name][i]['moved'] / max(1, result['used']):.2%}" for name in names)
            cells.append((f"{point['cache']:,}", *shares))
        lines = facts(result, "ids", "steps", "rows", "touched", "largest")
        lines["least cache"] = (
            f"--cache {result['least_cache']} holds every batch, and so does {result['least_cache_bytes']}B"
        )
        lines["moved"] = "rows brought in again, of those that batches use"
        lines["cache"] = columns(cells, left=())
        return lines | facts(result, "bytes", "step_ms_that_hides") | {"advice": result["sentence"]}
