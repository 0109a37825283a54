"""Runs bound by emulated links: the hash over equal links, and the plan for unequal ones, against other placements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.core.placement import Cut
from skirl.core.placement_plan import PlacementPlan, Site
from skirl.core.tables import Table
from skirl.placement.bench_runs import RowsJob, columns, counted, layout_of, plan_of, trained
from skirl.placement.loads import Loads
from skirl.placement.plan import bound_of, plan_for
from skirl.store import Link, LinkStore, MemoryStore
from skirl.store.placed.store import PlacedStore

UNLIKE = (4.0, 2.0, 1.0, 1.0)
"""Rates of the unequal sites, relative to each other."""
TIGHT = (0.25, 0.35, 0.3, 0.15)
"""Memory of the unequal sites where it binds, as shares of the rows that the run uses."""

WARM = 4
"""Batches of the warm-up run, before anything is timed."""


@dataclass(frozen=True)
class _Timed:
    """The time that a placement took, and the load of its busiest site."""

    seconds: float
    """Duration of the training loop."""
    busiest: float
    """Time of the busiest site: bytes in its busier direction, divided by its rate."""
    imbalance: float
    """Bytes of the busiest site over the mean of all, both directions added up, as where they share a rate."""
    most: float
    """The same in the busier direction: how many times faster a perfect balance would be."""


def measured(job: RowsJob, batches: Sequence[Any], counts: Sequence[int], step: float) -> dict[str, Any]:
    """Return how long each placement takes, relative to the hash or the bound.

    **Arguments**

    - `job`, `batches`: what to train; rows are numbered by frequency.
    - `counts`: numbers of links to try.
    - `step`: least seconds that the links take for a step.
    """
    tables = job.tables()
    with counted(job, batches) as loads:
        read, written, _ = loads.of_tables(slice(None))
        most = float(max(read.sum(), written.sum()))
        lookups = [float(job.batch * len(batches))] * len(tables)  # one id a sample in every table
        used = _used(batches)
        by_count = {}
        _timed(job, batches[:WARM], loads, [Site("warm")], [Cut((0,), (0,))] * len(tables))  # compiles the loops
        for count in counts:
            rate = most / len(loads) / step / count
            sites = [Site(f"site-{n}", rate=rate) for n in range(count)]
            ways = {
                "hash": [Cut.even(range(count))] * len(tables),
                "round_robin": [_whole(n % count) for n in range(len(tables))],
                "ranges": [_ranges(used[n], count) for n in range(len(tables))],
                "size": _greedy([float(t.rows * t.dim) for t in tables], count),
                "lookup": _greedy(lookups, count),
            }
            took = {name: _timed(job, batches, loads, sites, cuts) for name, cuts in ways.items()}
            ours = took["hash"]
            again = _timed(job, batches, loads, sites, ways["hash"]).seconds
            by_count[str(count)] = {
                "imbalance_hash": ours.imbalance,
                "noise": abs(again - ours.seconds) / min(again, ours.seconds),
                **{f"vs_{name}": took[name].seconds / ours.seconds for name in ways if name != "hash"},
                "vs_bytes": {
                    name: (took[name].seconds / ours.seconds) / (took[name].busiest / ours.busiest)
                    for name in ways
                    if name != "hash"
                },
                "vs_bound": ours.seconds / ours.busiest,
                "vs_ranges_most": took["ranges"].most,
                "shared_rate": {
                    **{f"vs_{name}": took[name].imbalance / ours.imbalance for name in ways if name != "hash"},
                    "vs_ranges_most": took["ranges"].imbalance,
                },
            }
        unlike = {
            name: _unlike(job, batches, loads, tables, most / step, memory)
            for name, memory in (("ample", ()), ("tight", TIGHT))
        }
    rows = list(by_count.values())
    return {
        "links": by_count,
        "unlike": unlike,
        "noise": max(of["noise"] for of in rows),
        "imbalance_hash": max(of["imbalance_hash"] for of in rows),
        **{name: min(of[name] for of in rows) for name in ("vs_round_robin", "vs_ranges", "vs_size", "vs_lookup")},
        "vs_ranges_most": min(of["vs_ranges_most"] for of in rows),
        "shared_rate": {name: min(of["shared_rate"][name] for of in rows) for name in rows[0]["shared_rate"]},
        "vs_bytes_min": min(min(of["vs_bytes"].values()) for of in rows),
        "vs_bound": max(of["vs_bound"] for of in unlike.values()),
        "vs_even": unlike["ample"]["vs_even"],
    }


def told(result: dict[str, Any]) -> dict[str, str]:
    """Return the result as printed lines, by name.

    **Arguments**

    - `result`: what `measured` returned.
    """
    lines = {
        f"{count} links": f"busiest {of['imbalance_hash']:.3f} of the mean; the hash is {of['vs_round_robin']:.2f} times as "
        f"fast as round robin, {of['vs_ranges']:.2f} as ranges, {of['vs_size']:.2f} as by size, {of['vs_lookup']:.2f} as by "
        f"lookups. By bytes, ranges take at most {of['vs_ranges_most']:.2f} times as long as a perfect balance, and "
        f"{of['shared_rate']['vs_ranges_most']:.2f} where reads and writes share a rate"
        for count, of in result["links"].items()
    }
    for name, of in result["unlike"].items():
        lines[f"unlike, {name}"] = (
            f"{of['vs_bound']:.3f} times the bound, {of['vs_even']:.2f} times as fast as an even hash"
        )
    return lines


def _unlike(
    job: RowsJob, batches: Sequence[Any], loads: Loads, tables: Sequence[Table], most: float, tight: Sequence[float]
) -> dict[str, float]:
    """Compare the plan for links of unequal rates with its bound and with an even hash."""
    rate = most / len(loads) / sum(UNLIKE)
    held = float(loads.of_tables(slice(0))[2].sum())
    memory = [int(held * share) for share in tight] or [None] * len(UNLIKE)
    sites = [Site(f"site-{n}", memory=memory[n], rate=rate * of) for n, of in enumerate(UNLIKE)]
    chosen = plan_for(loads, tables, sites, slice(0, len(loads) // 2))
    bound = bound_of(loads, sites, slice(None))
    ours = _timed(job, batches, loads, sites, [table.cut for table in chosen.plan.tables])
    even = _timed(job, batches, loads, sites, [Cut.even(range(len(sites)))] * len(tables))
    return {
        "vs_bound": ours.seconds / bound,
        "bytes_vs_bound": ours.busiest / bound,
        "vs_even": even.seconds / ours.seconds,
    }


def _timed(job: RowsJob, batches: Sequence[Any], loads: Loads, sites: Sequence[Site], cuts: Sequence[Cut]) -> _Timed:
    """Train over links with the sites' rates, and time the run."""
    plan = PlacementPlan(tuple(sites), plan_of(job, len(sites), cuts).tables)
    layout = layout_of(job)
    stores = [LinkStore(MemoryStore(layout), Link(rate=site.rate or math.inf)) for site in sites]
    store = PlacedStore(plan, stores, layout)
    seconds = trained(job, job.embeddings(store), batches).seconds
    store.close()
    found = loads.scored(plan.placement)
    # A perfect balance takes as long as the mean in the direction in which more moves.
    mean = max(found.bytes_read.sum(), found.bytes_written.sum()) / len(sites)
    rates = [site.rate or 1.0 for site in sites]
    return _Timed(seconds, found.seconds(rates), found.imbalance, float(found.busiest.max() / mean))


def _whole(site: int) -> Cut:
    return Cut((0,), (site,))


def _used(batches: Sequence[Any]) -> list[int]:
    """Return how many rows of each table are used. They are the first ones, because rows are numbered by frequency."""
    return (np.concatenate([columns(batch) for batch in batches]).max(axis=0) + 1).tolist()


def _ranges(rows: int, sites: int) -> Cut:
    """Cut a table into ranges of equal size, one for each site."""
    starts = sorted({rows * n // sites for n in range(sites)})
    return Cut(tuple(starts), tuple(range(len(starts))), "rows")


def _greedy(costs: Sequence[float], sites: int) -> list[Cut]:
    """Place whole tables, costliest first, each at the site with the least load."""
    loads, of = [0.0] * sites, [0] * len(costs)
    for table in sorted(range(len(costs)), key=lambda t: -costs[t]):
        of[table] = loads.index(min(loads))
        loads[of[table]] += costs[table]
    return [_whole(site) for site in of]
