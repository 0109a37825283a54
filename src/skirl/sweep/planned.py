"""`skirl sweep --plan`: predict the rows, bytes, steps and time of a sweep without allocating memory for it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from skirl.core.tables import Schema
from skirl.sweep.crews import how_many
from skirl.sweep.flags import RaceFlags
from skirl.sweep.rules import Rules
from skirl.sweep.timed import TRIED, Pack, seconds_a_step
from skirl.sweep.variants import Varied, seeds_of_one
from skirl.tools.machine import machine
from skirl.tools.progress import clock, size
from skirl.train.loop import keys_of
from skirl.train.recipe import Recipe
from skirl.train.verify import touched_rows

_OF_A_ROW = 19
"""Most bytes of index that a store in memory needs per row besides the row's record."""


def planned(
    recipe: Recipe, variants: Sequence[Varied], race: RaceFlags, flags: Mapping[str, Any], asked: int | str
) -> dict[str, Any]:
    """Return what a sweep takes. Nothing of it is allocated; steps are timed where they take hardly any memory.

    **Arguments**

    - `recipe`: what the variants have in common.
    - `variants`: the variants of the sweep.
    - `race`: when they leave.
    - `flags`: all of the command's, to write down.
    - `asked`: how many processes are to train the variants, or "auto".
    """
    total = _steps(recipe)
    known = recipe.stream().steps or recipe.data.steps
    rules, of = race.rules(known, recipe.data.epochs, flags["eval_every"]), seeds_of_one(variants)
    short = replace(recipe, data=replace(recipe.data, steps=TRIED, valid=None))
    schema, largest, samples, ids = Schema.of(short.tables()), 0, 0, 0
    for batch in short.stream():
        keys = keys_of(batch.sparse, schema)
        largest, samples, ids = max(largest, len(np.unique(keys))), samples + len(batch.labels), ids + len(keys)
    held = [Pack.of(variant.recipe) for variant in variants]
    packs: list[dict[str, Any]] = [
        {"name": variant.name, "record_bytes": one.record_bytes, "dense_bytes": 4 * one.weight_bytes}
        for variant, one in zip(variants, held, strict=True)
    ]
    rows = cache_rows(recipe, sum(p["record_bytes"] for p in packs))
    shapes: dict[Any, tuple[float, str]] = {}
    for variant, one, own in zip(variants, packs, held, strict=True):
        shape = variant.recipe.model, variant.recipe.layers, variant.recipe.optimizer
        if shape not in shapes:
            shapes[shape] = seconds_a_step(variant.recipe, own, ids / max(1, samples))
        seconds, by = shapes[shape]
        one |= {
            "seconds_a_step": seconds,
            "timed_by": by,
            "cache_bytes": None if rows is None else rows * one["record_bytes"],
        }
    all_rows = sum(table.rows for table in recipe.tables())
    most = None if total is None else most_steps(of, rules, total)
    each = sum(one["seconds_a_step"] for one in packs) / len(packs)
    average = None if most is None else most / (total or 1)
    processes = how_many(asked, recipe, len(variants), trace=False, racing=average)
    return {
        "command": "sweep",
        **flags,
        "packs": packs,
        "rows": rows,
        "rows_of_all": all_rows,
        "batch_rows": largest,
        "cache_bytes": None if rows is None else sum(one["cache_bytes"] for one in packs),
        "dense_bytes": sum(one["dense_bytes"] for one in packs),
        "store_bytes": int(all_rows * sum(one["record_bytes"] + _OF_A_ROW for one in packs))
        if recipe.cache.store == "memory"
        else None,
        "steps": total,
        "variant_steps": most,
        "processes_used": processes,
        "seconds": None if most is None else most * each / processes,
        "lone_seconds": None if total is None else total * len(packs) * each,
        "machine": machine(),
        "failed": None
        if rows is None or rows >= largest
        else f"cache is {recipe.cache.cache!r}, room for {rows:,} rows of each variant, and a batch needs {largest:,}: set "
        f"cache to {largest:,} rows of each or more, or to {size(largest * sum(p['record_bytes'] for p in packs))}",
    }


def _steps(recipe: Recipe) -> int | None:
    """Return the steps of the stream, or the number asked for; None if neither is known. Files are read for a few steps."""
    known = recipe.stream().steps
    if known is not None:
        return known
    few = sum(1 for _ in replace(recipe, data=replace(recipe.data, steps=TRIED)).stream())
    return min(few, recipe.data.steps or few) if few < TRIED else recipe.data.steps


def cache_rows(recipe: Recipe, record_bytes: float) -> int | None:
    """Return how many rows of each variant fit into the cache; None if that depends on the free memory at the start.

    **Arguments**

    - `recipe`: gives the cache.
    - `record_bytes`: bytes of one row, summed over all variants.
    """
    from skirl.engine.capacity import parse_cache

    rows = sum(table.rows for table in recipe.tables())
    kind, amount = parse_cache(recipe.cache_size(touched_rows(recipe) if recipe.counts_first else 0))
    if kind == "share":
        return int(rows * amount)
    if kind == "bytes":
        return min(rows, int(amount / record_bytes))
    return int(amount) if kind == "rows" else None


def most_steps(configurations: Sequence[int], rules: Rules, steps: int) -> int:
    """Return the steps of variants if they leave only at rungs, and the configurations with the most seeds stay.

    >>> most_steps([0, 1, 2, 3], Rules(rungs=(10, 20)), 100)
    140
    """
    count = max(configurations) + 1
    sizes = sorted((list(configurations).count(c) for c in range(count)), reverse=True)
    edges = [0, *(rung for rung in rules.rungs if rung < steps), steps]
    return sum(
        (end - begin) * sum(sizes[: rules.most(count, begin) if begin else count]) for begin, end in pairwise(edges)
    )


def as_lines(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the plan as lines of text, by title."""
    packs = plan["packs"]
    names = max(len(one["name"]) for one in packs)
    lines = {
        "variants": "\n".join(
            f"{one['name']:<{names}}  {one['record_bytes']:,.0f} bytes a row, {size(one['dense_bytes'])} of dense weights, "
            f"gradients and moments, {one['seconds_a_step'] * 1000:,.1f} ms a step"
            for one in packs
        ),
        "rows": "as many as fit into half of the memory that is free at the start" if plan["rows"] is None
        else f"{plan['rows']:,} of {plan['rows_of_all']:,} in the cache of each variant; a batch needs up to "
        f"{plan['batch_rows']:,} in the first {TRIED}",
        "memory": f"{size(plan['dense_bytes'])} of dense weights, and "
        + ("the caches" if plan["cache_bytes"] is None else f"{size(plan['cache_bytes'])} of caches")
        + ("" if plan["store_bytes"] is None else f"; up to {size(plan['store_bytes'])} of stores, if every row is used"),
    }  # fmt: skip
    if plan["variant_steps"] is None:
        lines["time"] = "unknown: set --steps"
    else:
        most, share = plan["variant_steps"], plan["variant_steps"] / (plan["steps"] * len(packs))
        lines["steps"] = f"{plan['steps']:,} of the stream, {most:,} of variants at most ({share:.0%} of all)"
        where = f" in {plan['processes_used']} processes" if plan["processes_used"] > 1 else ""
        by = " and ".join(sorted({one["timed_by"] for one in packs}))
        lines["time"] = (
            f"At most {_about(plan['seconds'])}{where}, estimated from {by} of each model. Less if variants are dropped, "
            f"and because reading is shared. One after the other they would take {_about(plan['lone_seconds'])}"
        )
    return lines


def _about(seconds: float) -> str:
    """Return predicted seconds as text.

    >>> _about(0.3), _about(75.2)
    ('a second', '1:15')
    """
    return clock(seconds) if seconds > 1 else "a second"
