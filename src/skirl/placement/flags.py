"""Flags that only `skirl place` has: the cache in front of the sites, and the sites."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from skirl.tools.units import parse_bytes
from skirl.train.flags import CacheFlags

if TYPE_CHECKING:
    from skirl.core.placement_plan import PlacementPlan, Site

MOST_SITES = 1024


@dataclass(frozen=True, kw_only=True)
class WindowFlags:
    """The cache in front of the sites, and how far ahead it is planned."""

    group: ClassVar[str] = "cache"

    cache: str = "10%"
    """Rows on the device: a number, 10% (of all), 4GiB, touched:10% (of those the run uses)."""
    depth: int | Literal["auto", "epoch"] = "auto"
    """Batches the oracle reads ahead: a number, auto (four times the cache in rows) or epoch (the whole run, read twice)."""
    prefetch: int = 2
    """Steps ahead of their use that rows are fetched."""

    def __post_init__(self) -> None:
        if CacheFlags(cache=self.cache).parsed()[0] == "auto":
            raise ValueError("cache is 'auto', whose size depends on the machine: set it to rows, a share or bytes")


@dataclass(frozen=True, kw_only=True)
class SiteFlags:
    """The sites that hold rows."""

    group: ClassVar[str] = "sites"

    sites: int | Literal["auto"] | None = None
    """Number of sites; auto: the fewest whose movement hides behind --step-ms. If not given, as many as --stores,
    --rates or --memory name, else as many as --from has, else 2."""
    stores: tuple[str, ...] | None = None
    """Store of each site: memory, disk:FOLDER, rpc://HOST:PORT or link:RATE,DELAY:STORE; if not given, as in --from,
    else memory."""
    rates: tuple[str, ...] | None = None
    """The rate at which each site moves rows in each direction, such as 10Gbit; one value applies to all. All alike if not
    given."""
    memory: tuple[str, ...] | None = None
    """Memory that the rows of each site may take, such as 4GiB; one value applies to all. No limit if not given."""
    step_ms: float | None = None
    """Milliseconds that a step computes; with --rates, this tells how much of the movement hides behind it."""
    trainers: int | None = None
    """Also count what this many trainers would exchange in a step, as rows and as pooled vectors, by table."""
    from_: Path | None = None
    """The plan by which rows are placed now; as few of them as possible move. Its sites are kept if --stores is not
    given."""
    move_at_most: str | None = None
    """With --from: the most bytes of rows that may move, such as 2GiB; the plan goes only that far. No limit if not
    given."""

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
        if self.trainers is not None and not 2 <= self.trainers <= MOST_SITES:
            raise ValueError(f"trainers is {self.trainers}: set it to 2 to {MOST_SITES}")
        if self.from_ is not None and self.sites == "auto":
            raise ValueError("sites is auto, and from_ names a plan: set sites to a number")
        if self.move_at_most is not None:
            if self.from_ is None:
                raise ValueError(
                    f"move_at_most is {self.move_at_most!r} and from_ is not set: name the plan that rows move from"
                )
            parsed_bytes(self.move_at_most, "move_at_most")
        for name in ("stores", "rates", "memory"):
            given = getattr(self, name)
            if given is not None and len(given) not in ((self.count,) if name == "stores" else (1, self.count)):
                said = " ".join(given)
                raise ValueError(f"{name} is {said}, and there are {self.count} sites: name one for each")
        self.made(1 if self.sites == "auto" else self.count)

    @property
    def count(self) -> int:
        """Number of sites; 1 if it is still to be found."""
        if self.sites is not None:
            return 1 if self.sites == "auto" else int(self.sites)
        named = [len(given) for given in (self.stores, self.rates, self.memory) if given is not None and len(given) > 1]
        return max(named, default=2 if self.from_ is None else len(self.old.sites))

    @cached_property
    def old(self) -> "PlacementPlan":
        """The plan by which rows are placed now."""
        from skirl.core.placement_plan import PlacementPlan

        assert self.from_ is not None
        return PlacementPlan.load(self.from_)

    def made(self, count: int) -> "list[Site]":
        """Return `count` sites, as the flags describe them."""
        from skirl.core.placement_plan import Site
        from skirl.store import check_sites

        memory = [parsed_bytes(text) for text in self.memory or ()]
        rates = [parsed_rate(text) for text in self.rates or ()]
        sites = [Site(f"site-{n}", self.stores[n] if self.stores else "memory") for n in range(count)]
        if self.from_ is not None and self.stores is None:
            known = self.old.sites
            if count > len(known) and any(site.store != "memory" for site in known):
                raise ValueError(f"from_ names {len(known)} sites, and there are {count}: name each with stores")
            sites = [*known[:count], *sites[len(known) :]]

        def of(given: list[Any], site: int, default: Any) -> Any:
            return default if not given else given[site if len(given) > 1 else 0]

        made = [replace(s, memory=of(memory, n, s.memory), rate=of(rates, n, s.rate)) for n, s in enumerate(sites)]
        rates_of(made)
        check_sites(made)
        return made


def rates_of(sites: "Sequence[Site]") -> list[float]:
    """Return the bytes per second of each site, or 1 for each if no rate is known. Raise if only some are known.

    **Arguments**

    - `sites`: the sites.
    """
    known = [site.name for site in sites if site.rate is not None]
    if known and (lacks := next((site.name for site in sites if site.rate is None), None)) is not None:
        raise ValueError(f"site {known[0]!r} has a rate and site {lacks!r} has none: set rates, one for each")
    return [1.0 if site.rate is None else site.rate for site in sites]


def check_out(out: Path | None, *, force: bool) -> None:
    """Raise unless a command may write its JSON file.

    **Arguments**

    - `out`: the file; None: none is written.
    - `force`: whether it may replace one that exists.
    """
    if out is not None and out.suffix != ".json":
        raise ValueError(f"out is {str(out)!r}: name a file that ends in .json")
    if out is not None and out.exists() and not force:
        raise ValueError(f"out is {out}, which already exists: name another file, or add --force to replace it")


def parsed_bytes(text: str, flag: str = "memory") -> int:
    """Parse the size that a flag gives, in bytes.

    **Arguments**

    - `text`: the text as given.
    - `flag`: the flag's name, for the error.
    """
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: set it to a size like 4GiB") from None


def parsed_rate(text: str, flag: str = "rates") -> float:
    """Parse the rate that a flag gives, in bytes per second.

    **Arguments**

    - `text`: the text as given.
    - `flag`: the flag's name, for the error.
    """
    from skirl.store.link import Link

    try:
        return Link.parse(f"{text},0us").rate
    except ValueError:
        raise ValueError(f"{flag} has {text!r}: write a rate like 10Gbit") from None
