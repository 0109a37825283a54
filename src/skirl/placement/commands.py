"""`skirl place` and `skirl place calibrate`: their flags, and what they print. What they do is imported when they run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.tools.flags import Composed
from skirl.tools.progress import size
from skirl.tools.sizes import parse_bytes
from skirl.train.flags import CacheFlags, OptimizerFlags, ShowFlags

MOST_SITES = 1024


@dataclass(frozen=True, kw_only=True)
class WindowFlags:
    """The cache in front of the sites, and how far it is planned."""

    group: ClassVar[str] = "cache"

    cache: str = "10%"
    """Rows on the device: a number, 10% (of all), 4GiB, touched:10% (of those the run uses)."""
    depth: int | Literal["auto", "epoch"] = "auto"
    """Batches the oracle reads ahead: a number, auto (four times the cache in rows) or epoch (the whole run, read twice)."""
    prefetch: int = 2
    """Steps ahead that rows travel."""

    def __post_init__(self) -> None:
        if CacheFlags(cache=self.cache).parsed()[0] == "auto":
            raise ValueError(
                "cache is 'auto', which is another size on another machine: set it to rows, a share or bytes"
            )


@dataclass(frozen=True, kw_only=True)
class SiteFlags:
    """The places of rows."""

    group: ClassVar[str] = "sites"

    sites: int | Literal["auto"] | None = None
    """How many; auto: the fewest whose movement hides behind --step-ms. As many as --stores, --rates or --memory name, or 2,
    if not given."""
    stores: tuple[str, ...] | None = None
    """Where each is: memory, disk:FOLDER, rpc://HOST:PORT or link:RATE,DELAY:STORE; all in memory if not given."""
    rates: tuple[str, ...] | None = None
    """How fast each moves rows, in each direction, as 10Gbit; one for all of them will do. Equal if not given."""
    memory: tuple[str, ...] | None = None
    """What the rows of each may take, as 4GiB; one for all of them will do. No limit if not given."""
    step_ms: float | None = None
    """What a step computes, in milliseconds; with --rates it tells how much of the movement hides."""

    def __post_init__(self) -> None:
        if self.sites not in (None, "auto") and not 1 <= int(self.sites or 0) <= MOST_SITES:
            raise ValueError(f"sites is {self.sites}: set it to 1 to {MOST_SITES}, or auto")
        if self.step_ms is not None and not 0 < self.step_ms < float("inf"):
            raise ValueError(f"step_ms is {self.step_ms}: set it to milliseconds above 0")
        if self.sites == "auto":
            if self.step_ms is None or self.rates is None or len(self.rates) != 1 or self.stores is not None:
                raise ValueError("sites is auto: set step_ms and one rate, and leave stores out")
            if self.memory is not None and len(self.memory) != 1:
                raise ValueError("sites is auto: set one memory for all sites, or none")
        for name in ("stores", "rates", "memory"):
            given = getattr(self, name)
            if given is not None and len(given) not in ((self.count,) if name == "stores" else (1, self.count)):
                said = " ".join(given)
                raise ValueError(f"{name} is {said}, and there are {self.count} sites: name one for each")
        self.made(1 if self.sites == "auto" else self.count)

    @property
    def count(self) -> int:
        """How many sites; 1 where that is to be found."""
        if self.sites is not None:
            return 1 if self.sites == "auto" else int(self.sites)
        named = [len(given) for given in (self.stores, self.rates, self.memory) if given is not None and len(given) > 1]
        return max(named, default=2)

    def made(self, count: int) -> Any:
        """So many sites."""
        from skirl.core.placement_plan import Site

        stores, memory = self.stores or ("memory",) * count, [_bytes(text) for text in self.memory or ()]
        rates = [_rate(text) for text in self.rates or ()]

        def of(given: list[Any], site: int) -> Any:
            return None if not given else given[site if len(given) > 1 else 0]

        return [Site(f"site-{n}", stores[n], of(memory, n), of(rates, n)) for n in range(count)]


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"memory is {text!r}: set it to a size like 4GiB") from None


def _rate(text: str) -> float:
    from skirl.store.link import Link

    try:
        return Link.parse(f"{text},0us").rate
    except ValueError:
        raise ValueError(f"rates has {text!r}: write a rate like 10Gbit") from None


@dataclass(frozen=True)
class Place(Composed):
    """Where rows are to live.

    >>> flags = {"data": "synthetic:tiny", "model": "dlrm-tiny", "dim": 4, "batch": 64, "steps": 20, "quiet": True}
    >>> result = Place.of(**flags, cache="touched:40%", sites=4, out=None).run()
    >>> result["even"], result["imbalance"] < 1.2
    (True, True)
    """

    group: ClassVar[str] = "output"
    common: ClassVar[tuple[str, ...]] = (
        "data", "model", "dim", "batch", "steps", "optimizer", "cache", "sites", "stores", "rates", "memory",
        "step_ms", "out",
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
    """The file to write the plan to, for --store placed:plan.json."""

    def __post_init__(self) -> None:
        self.data.stream().tables(self.model.row_dim)  # it checks dim
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {str(self.out)!r}: name a file that ends in .json")

    def run(self) -> dict[str, Any]:
        """Plan the run once, count, and choose."""
        from skirl.placement.place import placed

        return placed(self)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The plan as people read it."""
        lines = {
            "moved": f"{result['rows_read']:,} rows read and {result['rows_written']:,} written in {result['steps']:,} "
            f"steps, counted; sites hold {size(result['held'])}",
            "scored": f"{result['scored']:,} steps, with cuts from the {result['steps'] - result['scored']:,} before them",
        }
        for site in result["sites"]:
            memory = "" if site["memory"] is None else f" of {size(site['memory'])}"
            rate = "" if site["rate"] is None else f", busy {site['busy_ms']:.2f} ms a step"
            lines[site["name"]] = (
                f"{site['store']}: holds {size(site['held'])}{memory}; a step reads {size(site['read'])} and writes "
                f"{size(site['written'])}{rate}"
            )
        lines["busiest"] = f"{result['imbalance']:.3f} times the mean of the sites' bytes"
        if not result["even"]:
            lines["time"] = (
                f"{result['vs_bound']:.3f} times the bound; an even hash takes {result['even_vs_this']:.2f} times as long"
                + (" and passes a site's memory" if result["even_over_memory"] else "")
            )
        if result["hidden"] is not None:
            lines["hidden"] = (
                f"{result['hidden']:.0%} of the movement, estimated, behind {self.where.step_ms:g} ms a step"
            )
        if result["out"] is not None:
            lines["plan"] = result["out"]
        lines["advice"] = result["sentence"]
        return lines


@dataclass(frozen=True)
class Calibrate:
    """How fast a store moves rows: what --rates is to say of it.

    >>> Calibrate("memory", rows=2000, seconds=0.01).run()["bytes_a_second"] > 0
    True
    """

    common: ClassVar[tuple[str, ...]] = ("store", "width", "rows", "seconds")

    store: str
    """Which one: disk:FOLDER, link:RATE,DELAY:STORE or memory. On disk a folder inside it is used, and removed."""
    width: int = 65
    """Numbers of a record, with its optimizer state."""
    rows: int = 4096
    """Of a call."""
    seconds: float = 2.0
    """How long to write, and how long to read."""
    json: bool = False
    """Print one line of JSON."""

    def __post_init__(self) -> None:
        for name in ("width", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds is {self.seconds}: set it above 0")
        if "rpc:" in self.store or self.store.startswith("placed:"):
            raise ValueError(
                f"store is {self.store!r}: `skirl bench serve` measures memory nodes; name a store on this machine"
            )

    def run(self) -> dict[str, Any]:
        """Write and read."""
        from skirl.placement.calibrate import calibrated

        return calibrated(self.store, self.width, self.rows, self.seconds)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        return {
            "reads": f"{size(result['read'])} a second",
            "writes": f"{size(result['written'])} a second, flushed at the end",
            "advice": f"use --rates {result['rate']} for this site",
        }
