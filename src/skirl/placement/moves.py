"""Moves from one placement to another: a count of their bytes, and plans within a limit on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

from skirl.core.placement import Cut, Placement
from skirl.core.placement_plan import PlacementPlan, Site
from skirl.placement.loads import Loads
from skirl.tools.progress import size

_STEPS = 14
_CLOSE, _NONE = 30, 1e-9
"""Shares of the hash that differ by less than 2**-30 are equal; a share of less than 1e-9 is nothing."""


@dataclass(frozen=True)
class Old:
    """Where rows are before they move, with sites numbered as in a new plan.

    **Arguments**

    - `plan`: the old plan.
    - `sites`: for each old site, its number among the new ones; sites that are left out are numbered after those.
    - `new`: number of new sites.
    """

    plan: PlacementPlan
    sites: tuple[int, ...]
    new: int

    @classmethod
    def seen_from(cls, plan: PlacementPlan, sites: Sequence[Site]) -> "Old":
        """Match an old plan's sites with new ones: by their store or, where that is not one place, by store and name.

        **Arguments**

        - `plan`: the old plan.
        - `sites`: the new sites.
        """
        known = {_place_of(site): number for number, site in enumerate(sites)}
        numbers, gone = [], len(sites)
        for site in plan.sites:
            number = known.get(_place_of(site), gone)
            gone += number == gone
            numbers.append(number)
        return cls(plan, tuple(numbers), len(sites))

    @property
    def count(self) -> int:
        """Number of sites, including those that are left out."""
        return max(self.new, max(self.sites) + 1)

    def cuts(self) -> list[Cut]:
        """Return the cut of each table, with the new site numbers."""
        return [
            replace(table.cut, sites=tuple(self.sites[site] for site in table.cut.sites)) for table in self.plan.tables
        ]

    def placement(self) -> Placement:
        """Return where rows are, with the new site numbers."""
        return Placement(self.count, Cut((0,), (0,)), dict(enumerate(self.cuts())), "sites")


def moved_bytes(loads: Loads, old: Sequence[Cut], new: Sequence[Cut], sites: int) -> int:
    """Count the bytes of used rows, with their state, that end up at another site, row by row.

    **Arguments**

    - `loads`: the moves of the run.
    - `old`, `new`: the cut of each table.
    - `sites`: number of sites of both together.
    """
    before, after = (Placement(sites, Cut((0,), (0,)), dict(enumerate(cuts)), "sites") for cuts in (old, new))
    moved = 0
    for nbytes, keys in loads.new():
        moved += nbytes * int(np.count_nonzero(before.site_of(keys) != after.site_of(keys)))
    return moved


def shifted(cut: Cut, shares: Sequence[float]) -> Cut:
    """Return a cut by hash with new shares of sites that moves no more than it has to.

    **Arguments**

    - `cut`: the present cut.
    - `shares`: share of each site; they add up to 1.

    >>> shifted(Cut.even([0, 1]), [0.25, 0.5, 0.25]).sites, shifted(Cut.even([0, 1]), [0.5, 0.5]) == Cut.even([0, 1])
    ((0, 2, 1), True)
    """
    sums = [Fraction(0), *accumulate(map(Fraction, shares))]
    ends = [int(at / sums[-1] * cut.end) for at in sums]
    wants = [end - begin for begin, end in pairwise(ends)]
    has = [sum(end - begin for begin, end, of in cut.ranges if of == site) for site in range(len(wants))]
    differ = [site for site in range(len(wants)) if abs(wants[site] - has[site]) > cut.end >> _CLOSE]
    if not differ:
        return cut
    lacks = {site: wants[site] if site in differ else has[site] for site in range(len(wants))}
    lacks[max(differ, key=lambda site: wants[site])] += cut.end - sum(lacks.values())
    kept = list[tuple[int, int, int]]()
    loose = list[tuple[int, int]]()
    for begin, end, site in cut.ranges:
        keeps = min(end - begin, lacks.get(site, 0))
        if keeps:
            kept.append((begin, begin + keeps, site))
            lacks[site] -= keeps
        if keeps < end - begin:
            loose.append((begin + keeps, end))
    wanting = [(site, n) for site, n in lacks.items() if n > 0]
    for begin, end in loose:
        while begin < end:
            site, n = wanting.pop(0)
            taken = min(n, end - begin)
            kept.append((begin, begin + taken, site))
            begin += taken
            if taken < n:
                wanting.insert(0, (site, n - taken))
    kept.sort()
    first = [n for n, (_, _, site) in enumerate(kept) if n == 0 or kept[n - 1][2] != site]
    return Cut(tuple(kept[n][0] for n in first), tuple(kept[n][2] for n in first))


def shares_of(cut: Cut, sites: int) -> np.ndarray:
    """Return each site's share of the hash.

    **Arguments**

    - `cut`: a cut by hash.
    - `sites`: number of sites.
    """
    shares = np.zeros(sites)
    for begin, end, site in cut.ranges:
        shares[site] += (end - begin) / cut.end
    return shares


@dataclass(frozen=True)
class Moved:
    """A plan, and the bytes that have to move for it.

    **Arguments**

    - `plan`: where rows are to live.
    - `nbytes`: bytes of the rows that move.
    - `whole`: whether it reaches the wanted plan, because no limit was in the way.
    """

    plan: PlacementPlan
    nbytes: int
    whole: bool


def near(
    loads: Loads,
    old: Old,
    wanted: PlacementPlan,
    at_most: int | None,
    busy: Callable[[PlacementPlan], float],
    over: Callable[[PlacementPlan], np.ndarray],
) -> Moved:
    """Return a plan with the wanted shares that moves as few rows as possible, or goes as far as `at_most` allows.

    Two ways are tried: all tables go part of the way, or those that move most per byte held go first.

    **Arguments**

    - `loads`: the moves of the run.
    - `old`: where rows are now.
    - `wanted`: wanted shares of sites, as a plan.
    - `at_most`: most bytes that may move; None: no limit.
    - `busy`: returns the seconds of a plan's busiest site.
    - `over`: returns the bytes by which a plan exceeds each site's memory.
    """
    count, cuts = len(wanted.tables), old.cuts()
    read, written, held = loads.of_tables(slice(None))
    density = np.divide(read + written, held, out=np.zeros(len(held)), where=held > 0)
    order = np.argsort(-density, kind="stable").tolist()

    def plan_at(shares: Sequence[float]) -> tuple[PlacementPlan, int]:
        made = on_the_way(old, wanted, shares)
        return made, moved_bytes(loads, cuts, [table.cut for table in made.tables], old.count)

    plan, moved = plan_at([1.0] * count)
    if at_most is None or moved <= at_most:
        if (left := over(plan)).max() > 0:
            site = int(left.argmax())
            raise ValueError(
                f"site {wanted.sites[site].name!r} would hold {int(left[site]):,} bytes more than its memory: give it more"
            )
        return Moved(plan, moved, True)
    stays, least = plan_at([0.0] * count)
    if least > at_most:
        raise ValueError(
            f"the rows of sites that are left out take {size(least)}, more than the {size(at_most)} that may move: set "
            f"--move-at-most {least}B"
        )

    def together(share: float) -> list[float]:
        return [share] * count

    def densest(share: float) -> list[float]:
        reached = share * count
        shares = [0.0] * count
        for n, table in enumerate(order):
            shares[table] = min(1.0, max(0.0, reached - n))
        return shares

    found = [(stays, least)]
    for way in (together, densest):
        low, high, best = 0.0, 1.0, (stays, least)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            made = plan_at(way(middle))
            if made[1] <= at_most:
                low, best = middle, made
            else:
                high = middle
        found.append(best)
    plan, moved = min(found, key=lambda made: (max(0.0, float(over(made[0]).sum())), busy(made[0]), made[1]))
    if (left := over(plan)).max() > 0:
        site = int(left.argmax())
        raise ValueError(
            f"with {size(at_most)} that may move site {wanted.sites[site].name!r} exceeds its memory by {size(left[site])}"
            ": set --move-at-most higher"
        )
    return Moved(plan, moved, False)


def on_the_way(old: Old, wanted: PlacementPlan, shares: Sequence[float] | None = None) -> PlacementPlan:
    """Return a plan that goes a share of the way from an old one to another and moves no more than it has to.

    **Arguments**

    - `old`: where rows are now.
    - `wanted`: wanted shares of sites, as a plan.
    - `shares`: shares of the way, by table; None: all of it.
    """
    count, here = old.count, len(wanted.sites)
    of = zip(wanted.tables, old.cuts(), shares or [1.0] * len(wanted.tables), strict=True)
    return replace(
        wanted, tables=tuple(replace(t, cut=_part_way(cut, t.cut, share, count, here)) for t, cut, share in of)
    )


def _part_way(cut: Cut, goal: Cut, share: float, sites: int, here: int) -> Cut:
    """Return a cut that goes this share of the way to another. Rows at sites that are left out always go all of it."""
    if cut.by == "rows":  # the load of a range is not its length: all of it stays or all of it goes
        return goal if share >= 1 or any(site >= here for site in cut.sites) else cut
    was, aim = shares_of(cut, sites), shares_of(goal, sites)
    at = was + share * (aim - was)
    homeless = at[here:].sum()
    at[here:] = 0
    if homeless > _NONE:
        lacks = np.maximum(aim[:here] - at[:here], 0)
        at[:here] += homeless * (lacks / lacks.sum() if lacks.sum() > 0 else aim[:here])
    return shifted(cut, np.maximum(at, 0).tolist())


def _place_of(site: Site) -> str:
    """Return what identifies a site: its store if that is one place, else its store and name."""
    return site.store if "disk:" in site.store or "rpc:" in site.store else f"{site.store} {site.name}"
