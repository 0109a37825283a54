"""One pass over a run's ids and what it says about caches, counted by the planner that training would use."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from skirl.core.batch import Sparse
from skirl.core.keys import MAX_ROWS
from skirl.core.optim import RowOptimizer
from skirl.core.tables import Schema, Table
from skirl.engine.capacity import Capacity
from skirl.sizing.advice import Advice, advise, step_that_hides
from skirl.sizing.curve import cache_sizes, capacities, curves
from skirl.sizing.survey import Survey
from skirl.tools.progress import progress_of
from skirl.tools.units import Link

ON_DISK = 1.5
"""Maximum bytes in a disk store per byte of touched rows."""
INDEX_BYTES = 8
"""Bytes of memory that a disk store takes per touched row."""
WINDOW_BYTES = 28
"""Bytes of memory that the planner takes per id, and per distinct row of a batch, in the window."""


def sized(
    batches: Iterable[Sparse], tables: Sequence[Table], rule: RowOptimizer, prefetch: int, link: str | None,
    step_ms: float | None, total: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Read the ids once, then plan over them with every cache."""
    rate, step = link and Link.parse(link), step_ms and step_ms / 1e3
    with Survey(Schema.of(tables)) as survey:
        with progress_of("read ids", total) as progress:
            for number, sparse in enumerate(batches, start=1):
                survey.add(sparse)
                progress(number, lambda: {"ids": f"{survey.ids:,}", "touched": f"{sum(survey.touched):,}"})
        if not survey.steps:
            raise ValueError("the data has no whole batch: set batch smaller, or pass a loader that yields some")
        return _measured(survey, rule, prefetch, rate or None, step)


def _measured(
    survey: Survey, rule: RowOptimizer, prefetch: int, link: Link | None, step: float | None
) -> dict[str, Any]:
    found = curves(survey, cache_sizes(survey), prefetch)
    records = [4 * rule.width(bank.dim) for bank in survey.schema.banks]
    touched, used = sum(survey.touched), int(survey.used.sum())
    average = float(np.dot(records, survey.touched)) / max(1, touched)
    advice = advise(found, used, touched, average, link, step)
    chosen = next(p for p in found[f"depth {advice.depth}"] if p.cache == advice.cache)
    tiers = _tiers(survey, advice, records, prefetch)
    least, least_bytes = _holding_every_batch(survey, records)
    return {
        "ids": survey.ids,
        "steps": survey.steps,
        "rows": sum(table.rows for table in survey.schema.tables),
        "touched": touched,
        "used": used,
        "largest": int(survey.used.sum(axis=0).max()),
        "least_cache": least,
        "least_cache_bytes": least_bytes,
        "curves": {
            name: [{"cache": point.cache, "moved": point.moved} for point in points] for name, points in found.items()
        },
        "bytes": tiers,
        "advice": {name: value for name, value in asdict(advice).items() if name != "why"},
        "step_ms_that_hides": None if link is None else float(f"{1e3 * step_that_hides(chosen, average, link):.3g}"),
        "sentence": advice.sentence(tiers["cache"]),
    }


def _tiers(survey: Survey, advice: Advice, records: list[int], prefetch: int) -> dict[str, float]:
    """Return the bytes on the device, in memory and on disk with the advised cache."""
    slots, staging = capacities(survey, advice.cache, prefetch)
    rows = [sum(survey.schema.tables[t].rows for t in bank.tables) for bank in survey.schema.banks]
    touched = float(np.dot(records, survey.touched))
    share = min(advice.depth, survey.steps) / survey.steps
    return {
        "cache": float(np.dot(slots, records)),
        "staging": float(np.dot(staging, records)),
        "planner": WINDOW_BYTES * share * (survey.ids + int(survey.used.sum())),
        "touched": touched,
        "all": float(np.dot(rows, records)),
        "disk": ON_DISK * touched,
        "index": float(INDEX_BYTES * sum(survey.touched)),
    }


def _holding_every_batch(survey: Survey, records: list[int]) -> tuple[int, int]:
    """Return the least cache that surely runs, in rows and in bytes. Bytes include the half that staging may take."""
    banks = len(records)
    rows, dims = [MAX_ROWS] * banks, [bank.dim for bank in survey.schema.banks]
    in_rows, in_bytes = (Capacity(size, rows, records, dims) for size in (1, "1B"))
    least, least_bytes = (room.enough(int(room.needs(survey.used.T).max())) for room in (in_rows, in_bytes))
    return least, least_bytes
