"""The flags of `skirl place` that are its own: the cache in front of the sites, and the sites."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from skirl.tools.sizes import parse_bytes
from skirl.train.flags import CacheFlags

if TYPE_CHECKING:
    from skirl.core.placement_plan import PlacementPlan, Site

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
    trainers: int | None = None
    """Say also what so many trainers would exchange in a step, as rows and as pooled vectors, by table."""
    from_: Path | None = None
    """A plan by which rows are placed already: as few of them move as can be. Its sites, if --stores and
    --sites are not given."""
    move_at_most: str | None = None
    """With --from: what the rows that move may take, as 2GiB; the plan goes so far on the way. No limit if
    not given."""

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
        """How many sites; 1 where that is to be found."""
        if self.sites is not None:
            return 1 if self.sites == "auto" else int(self.sites)
        named = [len(given) for given in (self.stores, self.rates, self.memory) if given is not None and len(given) > 1]
        return max(named, default=2 if self.from_ is None else len(self.old.sites))

    @cached_property
    def old(self) -> "PlacementPlan":
        """The plan by which rows are placed already."""
        from skirl.core.placement_plan import PlacementPlan

        assert self.from_ is not None
        return PlacementPlan.load(self.from_)

    def made(self, count: int) -> "list[Site]":
        """So many sites."""
        from skirl.core.placement_plan import Site

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
        return made


def rates_of(sites: "Sequence[Site]") -> list[float]:
    """Bytes a second of each site; 1 of each where none is known. Known ones say nothing of the others.

    **Arguments**

    - `sites`: the places.
    """
    known = [site.name for site in sites if site.rate is not None]
    if known and (lacks := next((site.name for site in sites if site.rate is None), None)) is not None:
        raise ValueError(f"site {known[0]!r} has a rate and site {lacks!r} has none: set rates, one for each")
    return [1.0 if site.rate is None else site.rate for site in sites]


def parsed_bytes(text: str, flag: str = "memory") -> int:
    """The bytes of a flag.

    **Arguments**

    - `text`: as it was given.
    - `flag`: its name.
    """
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: set it to a size like 4GiB") from None


def parsed_rate(text: str, flag: str = "rates") -> float:
    """The bytes a second of a flag.

    **Arguments**

    - `text`: as it was given.
    - `flag`: its name.
    """
    from skirl.store.link import Link

    try:
        return Link.parse(f"{text},0us").rate
    except ValueError:
        raise ValueError(f"{flag} has {text!r}: write a rate like 10Gbit") from None
