"""Rows moved against cache size: the planner that trains, run over a survey for each cache, policy and depth."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skirl.engine.capacity import split_cache
from skirl.measure.sizing.survey import Survey
from skirl.oracle.options import Depth, Plan
from skirl.pipeline.simulate import planned
from skirl.pipeline.window import FIRST_WINDOW

KINDS: dict[str, tuple[Depth, str]] = {
    "least (whole run known)": ("epoch", "min"),
    "depth 200": (200, "min"),
    "depth 50": (50, "min"),
    "depth 10": (10, "min"),
    "depth 1": (1, "min"),
    "LRU": (1, "lru"),
}
"""Curves by the name that people read: what the oracle knows, and which rows leave."""
LEAST = "least (whole run known)"
CACHES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes that are tried, of the touched rows."""


@dataclass(frozen=True)
class Point:
    """What a run moves with one cache."""

    cache: int
    """Rows."""
    fetched: np.ndarray
    """Of each step: rows brought in again out of the store, or out of a pending write-back;"""
    read: np.ndarray
    """those of them that the store is asked for;"""
    written: np.ndarray
    """rows that leave the cache."""

    @property
    def moved(self) -> int:
        """Rows brought in again, in all."""
        return int(self.fetched.sum())


def cache_sizes(survey: Survey, shares: Sequence[float] = CACHES) -> list[int]:
    """Sizes worth trying: shares of the touched rows, from what the largest batch needs on."""
    touched = sum(survey.touched)
    least = int(survey.used.sum(axis=0).max(initial=1))
    sizes = {min(touched, max(least + least // 20 + len(survey.touched), round(share * touched))) for share in shares}
    return sorted(sizes)


def capacities(survey: Survey, cache: int, prefetch: int) -> tuple[list[int], list[int]]:
    """Slots and staging rows of each bank, as a run would split them."""
    first = survey.used[:, :FIRST_WINDOW]
    return split_cache(
        cache,
        rows=[max(1, n) for n in survey.touched],
        record_bytes=[1] * len(survey.touched),
        dims=[bank.dim for bank in survey.schema.banks],
        distinct=[int(bank.sum()) for bank in first],
        largest=[int(bank.max(initial=1)) for bank in survey.used],
        in_flight=2 * Plan(prefetch=prefetch).hold,
    )


def point(survey: Survey, cache: int, plan: Plan) -> Point:
    """Run the planner."""
    slots, staging = capacities(survey, cache, plan.prefetch)
    hold_rows = [rows // 2 for rows in staging]
    steps = planned(survey.narrowed(), survey.batches(), slots, plan, hold_rows=hold_rows)
    counts = [
        (
            sum(step.fetches for step in banks),
            sum(len(step.fetch_keys) for step in banks),
            sum(len(step.evict_keys) for step in banks),
        )
        for banks in steps
    ]
    fetched, read, written = np.array(counts, np.int64).reshape(-1, 3).T
    return Point(cache, fetched, read, written)


def curves(
    survey: Survey, sizes: Sequence[int], prefetch: int, on_point: Callable[[str, int], None] = lambda name, cache: None
) -> dict[str, list[Point]]:
    """Every curve over every size; `on_point` is called with the point that comes next."""
    lines: dict[str, list[Point]] = {name: [] for name in KINDS}
    for name, cache in runs(sizes):
        on_point(name, cache)
        depth, policy = KINDS[name]
        lines[name].append(point(survey, cache, Plan(depth, prefetch, policy)))
    return lines


def runs(sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    """What `curves` runs, in order."""
    return ((name, cache) for cache in sizes for name in KINDS)
