"""Rows moved by cache size: the planner of training, run over a survey for each cache, policy and depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from skirl.engine.capacity import CacheSplit, Capacity
from skirl.engine.window import FIRST_WINDOW
from skirl.oracle.epoch import planned
from skirl.oracle.options import Depth, Plan
from skirl.sizing.survey import Survey
from skirl.tools.progress import progress_of

KINDS: dict[str, tuple[Depth, str]] = {
    "least (whole run known)": ("epoch", "min"),
    "depth 200": (200, "min"),
    "depth 50": (50, "min"),
    "depth 10": (10, "min"),
    "depth 1": (1, "min"),
    "LRU": (1, "lru"),
}
"""Depth and policy of each curve, by the name that is shown."""
LEAST = "least (whole run known)"
CACHES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Cache sizes to try, as shares of the touched rows."""


@dataclass(frozen=True)
class Point:
    """The rows that a run moves with one cache. The arrays have a number for each step."""

    cache: int
    """Its size in rows."""
    moved: int
    """Rows refetched in total, from the store or from a pending write-back."""
    read: np.ndarray
    """Those of them that come from the store."""
    written: np.ndarray
    """Rows that leave the cache."""


def cache_sizes(survey: Survey, shares: Sequence[float] = CACHES) -> list[int]:
    """Return cache sizes to try: shares of the touched rows, none smaller than what the largest batch needs."""
    touched, least = sum(survey.touched), least_cache(survey)
    return sorted({min(touched, max(least, round(share * touched))) for share in shares})


def least_cache(survey: Survey) -> int:
    """Return the smallest cache that may be advised: the largest batch and a little more, or all touched rows."""
    least = int(survey.used.sum(axis=0).max(initial=1))
    return min(sum(survey.touched), least + least // 20 + len(survey.touched))


def capacities(survey: Survey, cache: int, prefetch: int) -> CacheSplit:
    """Return the slots and staging rows of each bank, split as a run would do it."""
    first = survey.used[:, :FIRST_WINDOW]
    dims = [bank.dim for bank in survey.schema.banks]
    capacity = Capacity(cache, [max(1, n) for n in survey.touched], [1] * len(survey.touched), dims)
    largest = [int(bank.max(initial=1)) for bank in survey.used]
    return capacity.divide([int(bank.sum()) for bank in first], largest, 2 * Plan(prefetch=prefetch).hold)


def point(survey: Survey, cache: int, plan: Plan) -> Point:
    """Run the planner over the survey with one cache and count what moves."""
    slots, staging = capacities(survey, cache, plan.prefetch)
    hold_rows = [rows // 2 for rows in staging]
    steps = planned(survey.narrowed(), survey, slots, plan, hold_rows=hold_rows)
    counts = [
        (
            sum(step.fetches for step in banks),
            sum(len(step.fetch_keys) for step in banks),
            sum(len(step.evict_keys) for step in banks),
        )
        for banks in steps
    ]
    fetched, read, written = np.array(counts, np.int64).reshape(-1, 3).T
    return Point(cache, int(fetched.sum()), read, written)


def curves(survey: Survey, sizes: Sequence[int], prefetch: int) -> dict[str, list[Point]]:
    """Return all curves over all sizes."""
    lines: dict[str, list[Point]] = {name: [] for name in KINDS}
    with progress_of("plan", len(sizes) * len(KINDS)) as progress:
        for done, (cache, name) in enumerate(product(sizes, KINDS), start=1):
            progress(done, lambda name=name, cache=cache: {"cache": f"{cache:,}", "policy": name})
            depth, policy = KINDS[name]
            lines[name].append(point(survey, cache, Plan(depth, prefetch, policy)))
    return lines
