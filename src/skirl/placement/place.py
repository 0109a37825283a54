"""The work of `skirl place`: plan one run, choose a placement by its first half, and score it by the rest."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from skirl.core.placement import Cut, Placement
from skirl.core.placement_plan import PlacementPlan, Site
from skirl.core.tables import Table
from skirl.data.flags import DataFlags
from skirl.models.flags import ModelFlags
from skirl.oracle.options import Plan
from skirl.placement.exchange import ExchangeCount, ids_of
from skirl.placement.flags import MOST_SITES, SiteFlags, WindowFlags, parsed_bytes, rates_of
from skirl.placement.loads import Loads, Scored, plan_run
from skirl.placement.moves import Moved, Old, near, on_the_way
from skirl.placement.picture import Steps, drawn
from skirl.placement.plan import Planned, bound_of, over_memory, plan_for, run_seconds
from skirl.tools.os_errors import writing
from skirl.tools.progress import Progress, size
from skirl.train.flags import CacheFlags, MovementFlags, OptimizerFlags, ShowFlags
from skirl.train.recipe import Recipe
from skirl.train.verify import touched_rows

HIDDEN = 1.05
"""Movement counts as hidden if the run takes at most this many times its computation alone."""


@dataclass(frozen=True)
class Placing:
    """The settings of one `skirl place` run; the fields are its flags."""

    data: DataFlags
    model: ModelFlags
    optimizer: OptimizerFlags
    window: WindowFlags
    where: SiteFlags
    show: ShowFlags
    out: Path | None
    page: Path | None = None


def placed(flags: Placing) -> dict[str, Any]:
    """Plan where rows live, write the plan, and return its figures with a sentence of advice.

    **Arguments**

    - `flags`: flags of the command.
    """
    window = flags.window
    recipe = Recipe(
        data=flags.data,
        model=flags.model,
        optimizer=flags.optimizer,
        cache=CacheFlags(cache=window.cache, depth=window.depth),
        movement=MovementFlags(prefetch=window.prefetch),
    )
    tables, trainers = recipe.tables(), flags.where.trainers
    if flags.where.from_ is not None:
        flags.where.old.check([(table.name, table.rows, table.dim) for table in tables])
    exchange = None if trainers is None else ExchangeCount([(table.name, table.dim) for table in tables], trainers)
    with _counted(recipe, flags, exchange) as loads:
        first, rest = slice(0, len(loads) // 2), slice(len(loads) // 2, None)
        sites = _sites(flags, loads)
        before, moved = _round_robin(sites, tables), None
        if flags.where.from_ is None:
            chosen = plan_for(loads, tables, sites, first)
        else:
            old = Old.seen_from(flags.where.old, sites)
            chosen = plan_for(loads, tables, sites, first, partial(on_the_way, old))
            before, moved = old.placement(), _moved(flags, loads, old, chosen, first)
            chosen = replace(chosen, plan=moved.plan)
        result = _result(flags, loads, chosen, rest) | _compared(flags, loads, chosen.plan, before, rest)
        result["exchange"] = None if exchange is None else exchange.facts()
        result |= {"moves": None if moved is None else moved.nbytes, "whole": moved is None or moved.whole}
        result["sentence"] = _sentence(flags, chosen, result)
        if flags.page is not None:
            page = drawn(result, Steps.of(loads, chosen.plan.placement, before, first, rest))
            with writing(flags.page):
                flags.page.parent.mkdir(parents=True, exist_ok=True)
                flags.page.write_text(page.html(), encoding="utf-8", errors="replace")
    if flags.out is not None:
        chosen.plan.save(flags.out)
    return result


def _round_robin(sites: Sequence[Site], tables: Sequence[Table]) -> Placement:
    """Place whole tables at one site after the other."""
    cuts = {n: Cut((0,), (n % len(sites),)) for n in range(len(tables))}
    return Placement(len(sites), Cut.even(range(len(sites))), cuts, "sites")


def _moved(flags: Placing, loads: Loads, old: Old, chosen: Planned, first: slice) -> Moved:
    rates, where = rates_of(chosen.plan.sites), flags.where
    at_most = None if where.move_at_most is None else parsed_bytes(where.move_at_most, "move_at_most")
    return near(
        loads, old, chosen.plan, at_most,
        busy=lambda plan: loads.scored(plan.placement, first).seconds(rates),
        over=lambda plan: over_memory(loads, plan),
    )  # fmt: skip


def _compared(
    flags: Placing, loads: Loads, plan: PlacementPlan, before: Placement, rest: slice
) -> dict[str, dict[str, Any]]:
    """Score the placement that the plan is compared with: tables dealt to sites in turn, or the plan of --from."""
    known = len(plan.sites)
    was, now = loads.scored(before, rest), loads.scored(plan.placement, rest)
    rates = rates_of(plan.sites)
    rates += [sum(rates) / known] * (before.sites - known)  # the rates of sites that are left out are unknown
    seconds = now.seconds(rates[:known])
    return {
        "before": {
            "name": "round robin" if flags.where.from_ is None else str(flags.where.from_),
            "imbalance": was.imbalance,
            "vs_this": was.seconds(rates) / seconds if seconds else 1.0,
            "held": was.held.tolist(),
            "over_memory": _exceeds(was.held, plan.sites),
            "busiest": (was.bytes_read + was.bytes_written).sum(axis=0).tolist(),
        }
    }


def _exceeds(held: np.ndarray, sites: Sequence[Site]) -> bool:
    return any(site.memory is not None and of > site.memory for site, of in zip(sites, held.tolist()))


def _counted(recipe: Recipe, flags: Placing, exchange: ExchangeCount | None) -> Loads:
    """Count what every step of the run moves, and what trainers would exchange."""
    touched = touched_rows(recipe) if recipe.counts_first else 0
    embeddings = recipe.embeddings(recipe.cache_size(touched))
    engine, stream = embeddings.engine, recipe.stream()
    by_table = [record.nbytes for record in engine.store.layout.records.values()]
    loads = Loads(len(engine.schema.tables), engine.record_bytes, by_table)
    plan = Plan(recipe.cache.depth, recipe.movement.prefetch)
    try:
        to = sys.stderr if flags.show.json else sys.stdout
        with Progress("plan", steps=stream.steps, to=to, quiet=flags.show.quiet) as progress:
            for step, moves in enumerate(plan_run(engine, _Ids(recipe, exchange), plan), start=1):
                loads.add(moves)
                progress(step, lambda: {"read": f"{sum(map(len, moves.read)):,}"})  # noqa: B023
        if not len(loads):
            raise ValueError(f"{flags.data.data} has no batch of {flags.data.batch:,} samples: set --batch smaller")
    except BaseException:
        loads.close()
        raise
    finally:
        embeddings.close()
    return loads


class _Ids:
    """The ids of a run, which can be read again; what trainers would exchange is counted the first time only."""

    def __init__(self, recipe: Recipe, exchange: ExchangeCount | None) -> None:
        self._recipe, self._exchange = recipe, exchange

    def __iter__(self) -> Any:
        exchange, self._exchange = self._exchange, None
        tables = self._recipe.tables()
        for batch in self._recipe.stream():
            if exchange is not None:
                exchange.add(ids_of(batch.sparse, tables, exchange.trainers))
            yield batch.sparse


def _sites(flags: Placing, loads: Loads) -> list[Site]:
    """Return the sites as named or, for auto, the fewest behind which the movement hides."""
    where = flags.where
    if where.sites != "auto":
        return where.made(where.count)
    [site] = where.made(1)
    assert where.step_ms is not None and site.rate is not None
    step, rate, memory = where.step_ms / 1e3, site.rate, site.memory
    most = HIDDEN * len(loads) * step
    moved = loads.scored(Placement.even(1, "sites"))
    least = max(1, int(np.ceil(moved.busiest.max() / (rate * most))))
    least = least if memory is None else max(least, -(-int(moved.held.sum()) // memory))

    def hides(count: int) -> bool:
        found = moved if count == 1 else loads.scored(Placement.even(count, "sites"))
        fits = memory is None or int(found.held.max()) <= memory
        return fits and _together(found, [rate] * count, step, flags.window.prefetch) <= most

    count = fewest(hides, least, MOST_SITES)
    if count is None:
        raise ValueError(
            f"no number of sites up to {MOST_SITES} hides the movement behind {where.step_ms:g} ms a step: set a higher "
            "rate, a larger cache or a longer step"
        )
    return where.made(count)


def fewest(enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the least number that is enough, or None. Any larger number must be enough too.

    Steps double at first and are then halved, so that numbers far above the result are not tried: what a long run moves
    at a thousand sites takes gigabytes to count.

    **Arguments**

    - `enough`: whether a number is enough.
    - `least`, `most`: first and last number to consider.

    >>> fewest(lambda count: count >= 700, 3, 1024), fewest(lambda count: False, 3, 1024)
    (700, None)
    """
    below, count, more = least - 1, least, 1
    if least > most:
        return None
    while not enough(count):
        if count == most:
            return None
        below, count, more = count, min(most, count + more), 2 * more
    while count - below > 1:
        middle = (below + count) // 2
        below, count = (below, middle) if enough(middle) else (middle, count)
    return count


def _together(found: Scored, rates: Sequence[float], step: float, prefetch: int) -> float:
    return run_seconds(found.bytes_read, found.bytes_written, rates, 0.0, step, prefetch)


def _result(flags: Placing, loads: Loads, chosen: Planned, rest: slice) -> dict[str, Any]:
    plan, where = chosen.plan, flags.where
    found = loads.scored(plan.placement, rest)
    even = loads.scored(Placement.even(len(plan.sites), "sites"), rest)
    whole = loads.scored(Placement.even(1, "sites"))
    rates = rates_of(plan.sites)
    scored = max(1, len(found.rows_read))
    seconds, even_seconds = found.seconds(rates), even.seconds(rates)
    bound = bound_of(loads, plan.sites, rest)
    known = all(site.rate is not None for site in plan.sites)
    hidden = None
    if known and where.step_ms is not None:
        step = where.step_ms / 1e3
        alone, moving = step * scored, float((found.busiest / np.array(rates)).max())
        over = _together(found, rates, step, flags.window.prefetch) - max(alone, moving)
        hidden = 1 - over / min(alone, moving) if moving else 1.0
    return {
        "command": "place",
        "data": flags.data.data,
        "steps": len(loads),
        "scored": len(found.rows_read),
        "rows_read": int(whole.rows_read.sum()),
        "rows_written": int(whole.rows_written.sum()),
        "held": int(found.held.sum()),
        "even": chosen.even,
        "sites": [
            {
                "name": site.name,
                "store": site.store,
                "memory": site.memory,
                "rate": site.rate,
                "held": int(found.held[n]),
                "read": float(found.bytes_read[:, n].sum() / scored),
                "written": float(found.bytes_written[:, n].sum() / scored),
                "busy_ms": float(found.busiest[n] / rates[n] / scored * 1e3) if known else None,
            }
            for n, site in enumerate(plan.sites)
        ],
        "imbalance": found.imbalance,
        "vs_bound": seconds / bound if bound else 1.0,
        "even_vs_this": even_seconds / seconds if seconds else 1.0,
        "even_over_memory": _exceeds(even.held, plan.sites),
        "hidden": hidden,
        "digest": plan.placement.digest,
        "out": None if flags.out is None else str(flags.out),
        "page": None if flags.page is None else str(flags.page),
    }


def _sentence(flags: Placing, chosen: Planned, result: dict[str, Any]) -> str:
    plan = chosen.plan
    use = "" if flags.out is None else f" Train with --store placed:{flags.out}."
    if not result["whole"]:
        return (
            f"{size(result['moves'])} of rows move, as much as --move-at-most {flags.where.move_at_most} allows; "
            f"the sites are not equally busy yet.{use}"
        )
    if len(plan.sites) == 1:
        return f"One site holds and moves all rows.{use}"
    if chosen.even:
        return f"The {len(plan.sites)} sites are equal, so rows are placed by a plain hash: nothing better exists.{use}"
    return (
        "The sites differ: each table is cut by hash, in parts that make them busy equally long as far as memory allows."
        f"{use}"
    )
