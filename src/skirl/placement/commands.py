"""`skirl place` and `skirl place calibrate`: flags and printed output. The work itself is imported when they run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.placement.flags import SiteFlags, WindowFlags, check_out
from skirl.tools.flags import Composed
from skirl.tools.progress import size
from skirl.train.flags import OptimizerFlags, ShowFlags


@dataclass(frozen=True)
class Place(Composed):
    """Plan where rows live.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 20, "quiet": True}
    >>> result = Place.of(**flags, cache="touched:40%", sites=4, out=None).run()
    >>> result["even"], result["imbalance"] < 1.2
    (True, True)
    """

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = (
        "data", "model", "dim", "batch", "steps", "cache", "sites", "stores", "rates", "out",
    )  # fmt: skip
    positional: ClassVar[str] = "data"
    example: ClassVar[str] = "skirl place synthetic:avazu --model dlrm-tiny --dim 16 --batch 1024 --steps 50 --sites 4"

    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    window: WindowFlags = field(default_factory=WindowFlags)
    where: SiteFlags = field(default_factory=SiteFlags)
    show: ShowFlags = field(default_factory=ShowFlags)
    out: Path | None = Path("plan.json")
    """File to write the plan to, for --store placed:plan.json."""
    force: bool = False
    """Replace the file if it exists."""
    page: Path | None = None
    """Write a page with plots to this .html file."""

    def __post_init__(self) -> None:
        self.data.stream().tables(self.model.row_dim)  # it checks dim
        check_out(self.out, force=self.force)
        if self.page is not None and self.page.suffix != ".html":
            raise ValueError(f"page is {str(self.page)!r}: name a file that ends in .html")

    def run(self) -> dict[str, Any]:
        """Plan the run once, count what moves, and choose a plan."""
        from skirl.placement.place import Placing, placed

        parts = (self.data, self.model, self.optimizer, self.window, self.where, self.show)
        return placed(Placing(*parts, out=self.out, page=self.page))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the plan as printed lines, by name."""
        lines = {
            "moved": f"{result['rows_read']:,} rows read and {result['rows_written']:,} written in {result['steps']:,} "
            f"steps, counted; sites hold {size(result['held'])}",
            "scored": f"{result['scored']:,} steps, with cuts from the {result['steps'] - result['scored']:,} before them",
        }
        for site in result["sites"]:
            memory = "" if site["memory"] is None else f" of {size(site['memory'])}"
            rate = "" if site["rate"] is None else f", busy {site['busy_ms']:.3g} ms a step"
            lines[site["name"]] = (
                f"{site['store']}: holds {size(site['held'])}{memory}; a step reads {size(site['read'])} and writes "
                f"{size(site['written'])}{rate}"
            )
        lines["busiest"] = f"{result['imbalance']:.3f} times the mean of the sites' bytes"
        if not result["even"]:
            even = _compared(result["even_vs_this"], result["even_over_memory"])
            lines["time"] = (
                f"{result['vs_bound']:.3f} times that of parts with exactly their shares; an even hash takes {even}"
            )
        before = result["before"]
        lines["before"] = (
            f"{before['name']} takes {_compared(before['vs_this'], before['over_memory'])}; its busiest site moves "
            f"{before['imbalance']:.3f} times the mean"
        )
        if result["moves"] is not None:
            lines["moves"] = f"{size(result['moves'])} of rows that the run uses, from {before['name']}"
        if result["hidden"] is not None:
            lines["hidden"] = (
                f"{result['hidden']:.0%} of the movement, estimated, behind {self.where.step_ms:g} ms a step"
            )
        if result["exchange"] is not None:
            lines["exchange"] = _exchange(result["exchange"])
        if result["out"] is not None:
            lines["plan"] = result["out"]
        if result["page"] is not None:
            lines["page"] = result["page"]
        lines["advice"] = result["sentence"]
        return lines


_NAMED = 6


def _compared(times: float, over_memory: bool) -> str:
    """Say how long another placement takes, and if so, that it would not fit."""
    return f"{times:.2f} times as long as this plan" + (", but exceeds a site's memory" if over_memory else "")


def _exchange(facts: dict[str, Any]) -> str:
    """Describe what trainers would exchange, and which tables are better exchanged as rows and which pooled."""
    text = (
        f"{facts['trainers']} trainers, a step: {size(facts['rows'])} as rows (owners by hash {size(facts['hashed'])}, "
        f"their partial sums {size(facts['partial'])}), {size(facts['pooled'])} pooled, {size(facts['better'])} the better "
        "by table"
    )
    for way in ("rows", "pooled"):
        names = [of["name"] for of in facts["tables"] if of["better"] == way]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        text += f"\nas {way}: {', '.join(names[:_NAMED]) or 'none'}{more}"
    return text


@dataclass(frozen=True)
class Calibrate:
    """Measure how fast a store moves rows, to set --rates.

    >>> Calibrate("memory", rows=2000, seconds=0.01).run()["bytes_a_second"] > 0
    True
    """

    common: ClassVar[tuple[str, ...]] = ("store", "width", "rows", "seconds")
    elsewhere: ClassVar[dict[str, str]] = {
        "minutes": "write skirl place costs --minutes 1 for the costs of tables; this command measures a store"
    }

    store: str
    """The store to measure: disk:FOLDER, rpc://HOST:PORT, link:RATE,DELAY:STORE or memory. On disk, a folder inside FOLDER
    is used and then removed. Memory nodes hold at most 64 MiB for the measurement, which touches no trainer's rows."""
    width: int = 65
    """Numbers in a record, including its optimizer state."""
    rows: int = 4096
    """Rows in a call."""
    seconds: float = 2.0
    """Seconds to write, and then to read."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        for name in ("width", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}: set it above 0")
        if self.store.startswith("placed:"):
            raise ValueError(f"store is {self.store!r}: measure the store of each of its sites")
        from skirl.store.link import without_links
        from skirl.store.remote.wire import Address, hush

        if (nodes := without_links(self.store)).startswith("rpc:"):
            Address.parse(nodes)
            hush()
            if "/rank-" in nodes:
                raise ValueError(f"store is {self.store!r}: leave /rank-N out, what is measured is no trainer's")

    def run(self) -> dict[str, Any]:
        """Measure writing and reading."""
        from skirl.placement.calibrate import calibrated

        return calibrated(self.store, self.width, self.rows, self.seconds)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as printed lines, by name."""
        return {
            "reads": f"{size(result['read'])} a second",
            "writes": f"{size(result['written'])} a second, flushed at the end",
            "advice": f"use --rates {result['rate']} for this site",
        }
