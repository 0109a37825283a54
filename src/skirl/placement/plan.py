"""From counted loads to a plan: even for equal sites, else with the least time of the busiest one within memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from skirl.core.placement import Cut
from skirl.core.placement_plan import PlacedTable, PlacementPlan, Site
from skirl.core.tables import Table
from skirl.placement.flags import rates_of
from skirl.placement.loads import Loads
from skirl.placement.shares import NoRoom, least_busy
from skirl.tools.progress import size

_TRIES = 30
_NAMED = 3
"""Most tables that an error names."""


@dataclass(frozen=True)
class Planned:
    """A plan, and whether it is an even one."""

    plan: PlacementPlan
    even: bool
    """All tables are cut evenly, because the sites are equal and no memory limit binds."""


def plan_for(
    loads: Loads,
    tables: Sequence[Table],
    sites: Sequence[Site],
    first: slice,
    laid: Callable[[PlacementPlan], PlacementPlan] = lambda plan: plan,
) -> Planned:
    """Plan where rows live.

    **Arguments**

    - `loads`: the moves of the run.
    - `tables`: tables of the model.
    - `sites`: the sites, with memory and rate of each as far as known.
    - `first`: the steps that the cuts come from.
    - `laid`: lays a plan's shares out as they will be, close to an old plan; memory limits apply to the result. By
      default the plan stays as it is.
    """
    rows = sum(table.rows for table in tables)
    if len(sites) > rows:
        raise ValueError(f"there are {len(sites)} sites for {rows} rows: set fewer sites than rows")
    moved, held = _moved_and_held(loads, first)
    rates = rates_of(sites)
    caps = _caps(sites)
    if held.sum() > caps.sum():
        raise ValueError(_no_room(tables, held, caps))
    even = Cut.even(range(len(sites)))
    if len(set(rates)) == 1:
        plan = _plan(loads, sites, tables, [even] * len(tables))
        if not _over(loads, laid(plan), caps).any():
            return Planned(plan, True)
    allowed = caps.copy()
    for _ in range(_TRIES):
        try:
            shares, _ = least_busy(moved.tolist(), held.tolist(), rates, allowed.tolist())
        except NoRoom:
            break
        cuts = [Cut.weighted(of.tolist()) for of in np.where(shares < 1e-9, 0, shares)]
        plan = _plan(loads, sites, tables, cuts)
        over = _over(loads, laid(plan), caps)
        if not over.any():
            return Planned(plan, False)
        allowed -= np.where(over > 0, over + 1e-4 * caps, 0)  # a hash divides rows only approximately
    raise ValueError(
        f"the rows take {size(float(held.sum()))} of the {size(float(caps.sum()))} that all sites hold, too close for a "
        "hash to divide them without passing one: give the sites a little more memory"
    )


def bound_of(loads: Loads, sites: Sequence[Site], which: slice) -> float:
    """Return the least seconds for the busiest site if each part of a table moved exactly its share of the table's bytes.

    Without limits of memory, no placement takes less. With them a plan may, if a hash divides rows luckily.

    **Arguments**

    - `loads`: the moves of the run.
    - `sites`: the sites, which hold all rows; without rates, each moves one byte per second.
    - `which`: the steps.
    """
    moved, held = _moved_and_held(loads, which)
    rates = rates_of(sites)
    return least_busy(moved.tolist(), held.tolist(), rates, _caps(sites).tolist())[1]


def _moved_and_held(loads: Loads, which: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each table moves in the busier direction of some steps, and the bytes of its rows."""
    read, written, held = loads.of_tables(which)
    return read if read.sum() >= written.sum() else written, held


def _plan(loads: Loads, sites: Sequence[Site], tables: Sequence[Table], cuts: Sequence[Cut]) -> PlacementPlan:
    sizes = loads.by_table or [None] * len(tables)
    placed = (PlacedTable(t.name, t.rows, t.dim, cut, size) for t, cut, size in zip(tables, cuts, sizes, strict=True))
    return PlacementPlan(tuple(sites), tuple(placed))


def over_memory(loads: Loads, plan: PlacementPlan) -> np.ndarray:
    """Return the bytes by which the rows of each site exceed its memory, counted row by row.

    **Arguments**

    - `loads`: the moves of the run.
    - `plan`: where rows live.
    """
    return _over(loads, plan, _caps(plan.sites))


def _caps(sites: Sequence[Site]) -> np.ndarray:
    return np.array([math.inf if site.memory is None else float(site.memory) for site in sites])


def _over(loads: Loads, plan: PlacementPlan, caps: np.ndarray) -> np.ndarray:
    if np.isinf(caps).all():
        return np.zeros(len(caps))
    held = loads.held(plan.placement)
    return np.where(np.isinf(caps), 0, np.maximum(held - np.where(np.isinf(caps), 0, caps), 0))


def _no_room(tables: Sequence[Table], held: np.ndarray, caps: np.ndarray) -> str:
    lacks = float(held.sum() - caps.sum())
    largest = ", ".join(f"{tables[t].name} {size(float(held[t]))}" for t in np.argsort(-held)[:_NAMED])
    more = math.ceil(lacks / (caps.sum() / len(caps)))
    return (
        f"the rows that the run uses take {size(held.sum())} with their state ({largest}), the sites hold "
        f"{size(caps.sum())}, {size(lacks)} too little: give them more memory, or add {more} more such sites"
    )


def run_seconds(
    read: np.ndarray, written: np.ndarray, rates: Sequence[float], delay: float, step: float, prefetch: int
) -> float:
    """Estimate how many seconds a run takes whose steps compute while rows move to and from several sites.

    **Arguments**

    - `read`, `written`: bytes [steps, sites].
    - `rates`: bytes per second of each site, in each direction.
    - `delay`: seconds of latency of each call.
    - `step`: seconds that each step computes.
    - `prefetch`: steps ahead of their use that rows are fetched.

    >>> run_seconds(np.array([[0, 0], [100, 50]]), np.zeros((2, 2)), [100, 100], 0.0, 1.0, 2)
    2.0
    """
    sites = len(rates)
    takes_read, takes_write = (np.where(of > 0, of / np.asarray(rates) + delay, 0.0) for of in (read, written))
    ends, arrived, wrote = np.zeros(len(read) + 1), np.zeros(sites), np.zeros(sites)
    for t in range(len(read)):
        arrived = np.maximum(arrived, ends[max(0, t - prefetch)]) + takes_read[t]
        ends[t + 1] = max(ends[t], arrived.max()) + step
        wrote = np.maximum(wrote, ends[t]) + takes_write[t]
    return float(max(ends[-1], wrote.max(initial=0.0)))
