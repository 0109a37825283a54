"""Advice from the curves: a cache, a depth, and what smaller rows would save."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.core.half import words
from skirl.measure.sizing.curve import LEAST, Point
from skirl.measure.sizing.overlap import Overlap, overlap
from skirl.store.link import Link
from skirl.tools.progress import size

FEW = 0.05
"""A cache brings in few rows again if they are at most this share of the rows used."""
NEAR = 1.05
"""A depth is near enough if it brings in at most this many times the least possible."""
HIDDEN = 1.05
"""Movement is hidden if a run takes at most this many times as long as its computation alone."""
CLOSE = 0.01
"""Precision of the search for the smallest cache, as a share of the cache; at least one row."""
DEPTHS = ("depth 1", "depth 10", "depth 50", "depth 200")


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run: how large rows are, how fast they travel, how long a step computes."""

    record_bytes: float
    """Bytes of a row with its optimizer state; an average over touched rows if tables differ in dim."""
    prefetch: int
    link: Link | None = None
    step: float | None = None
    """Seconds that a step computes."""

    def overlap(self, point: Point) -> Overlap | None:
        """Estimate the times of a run with this cache. Return None if link or step is unknown."""
        if self.link is None or self.step is None:
            return None
        read, written = point.read * self.record_bytes, point.written * self.record_bytes
        return overlap(read, written, self.step, self.link, self.prefetch)


@dataclass(frozen=True)
class Advice:
    """A recommended cache and depth, and why."""

    cache: int
    depth: int
    share_of_touched: float
    moved: float
    """Rows brought in again, as a share of the rows that batches use."""
    to_least: float | None
    """The same as a multiple of the least possible; None if that is 0."""
    lru: float | None
    """Rows that LRU brings in again, as a multiple of ours; None if ours is 0."""
    why: str

    def sentence(self, cache_bytes: float) -> str:
        """Return the recommendation as a sentence, with the flags to set."""
        lru = "" if self.lru is None or self.lru < 1.05 else f"; LRU would bring in {self.lru:.1f} times as many"
        least = "the least possible" if self.to_least is None else f"{self.to_least:.2f} times the least possible"
        return (
            f"Use --cache {self.cache} --depth {self.depth}: {size(cache_bytes)} of cache on the device, "
            f"{self.share_of_touched:.0%} of the rows that are touched, {self.why}; "
            f"{self.moved:.1%} of the rows that batches use are brought in again, {least}{lru}."
        )


def goal(used: int, conditions: Conditions) -> Callable[[Point], bool]:
    """Return whether a cache is good enough, as a function: it hides its movement behind the step or, if link or step is
    unknown, brings in few rows again."""

    def fits(point: Point) -> bool:
        run = conditions.overlap(point)
        if run is None or conditions.step is None:
            return point.moved <= FEW * used
        return run.together <= HIDDEN * len(point.read) * conditions.step

    return fits


def smallest(
    fits: Callable[[Point], bool], tried: Sequence[Point], measure: Callable[[int], Point], least: int, most: int
) -> Point:
    """Find the smallest cache that `fits` by bisection between those tried.

    **Arguments**

    - `fits`: returns whether a cache is good enough; if one fits, so does every larger one.
    - `tried`: caches that were measured, from the smallest on.
    - `measure`: measures another cache.
    - `least`, `most`: rows of the smallest and of the largest cache that can be advised; the latter fits.

    >>> none = np.zeros(1, np.int64)
    >>> measure = lambda cache: Point(cache, none + 100 - cache, none, none)
    >>> smallest(lambda point: point.moved <= 40, [measure(20), measure(90)], measure, 10, 100).cache
    60
    """
    first = next((i for i, point in enumerate(tried) if fits(point)), len(tried))
    found = tried[first] if first < len(tried) else measure(most)
    low = tried[first - 1].cache if first else least
    if not first and found.cache > least:
        lowest = measure(least)
        found = lowest if fits(lowest) else found
    while found.cache - low > max(1, CLOSE * found.cache):
        between = measure((low + found.cache) // 2)
        if fits(between):
            found = between
        else:
            low = between.cache
    return found


def advise(curves: Mapping[str, Sequence[Point]], used: int, touched: int, conditions: Conditions) -> Advice:
    """Choose the smallest cache on the curves that meets the `goal`, and the least depth that is near the least possible.

    `used`: rows that batches use, in total.
    """
    slow = conditions.link is not None and conditions.step is not None
    fits = goal(used, conditions)
    deepest = curves["depth 200"]
    chosen = next((i for i, point in enumerate(deepest) if fits(point)), len(deepest) - 1)
    enough_cache = fits(deepest[chosen])
    if enough_cache:
        why = (
            "the smallest cache whose movement hides behind the step"
            if slow
            else f"the smallest cache that brings in again at most {FEW:.0%} of the rows used"
        )
    else:
        why = (
            "the largest cache tried, and the link is too slow for this step"
            if slow
            else f"the largest cache tried, which still brings in again more than {FEW:.0%} of the rows used"
        )
    least = curves[LEAST][chosen].moved
    enough = max(NEAR * least, least + 0.01 * used)
    near = (name for name in DEPTHS if curves[name][chosen].moved <= enough)
    name = next((name for name in near if fits(curves[name][chosen]) or not enough_cache), DEPTHS[-1])
    ours = curves[name][chosen]
    lru = curves["LRU"][chosen].moved
    return Advice(
        cache=ours.cache,
        depth=int(name.split()[1]),
        share_of_touched=ours.cache / max(1, touched),
        moved=ours.moved / max(1, used),
        to_least=ours.moved / least if least else None,
        lru=lru / ours.moved if ours.moved else None,
        why=why,
    )


def moved_at(points: Sequence[Point], cache: float) -> float:
    """Estimate the rows that a cache would bring in again, by linear interpolation between those tried.

    >>> none = np.zeros(1, np.int64)
    >>> moved_at([Point(10, none + 100, none, none), Point(20, none + 50, none, none)], 15)
    75.0
    """
    return float(np.interp(cache, [point.cache for point in points], [point.moved for point in points]))


def reductions(
    points: Sequence[Point], cache: int, dim: int, records: Mapping[int, tuple[int, int]], touched: int, steps: int
) -> list[dict[str, Any]]:
    """Return what smaller rows would save if the cache keeps its size in bytes.

    `records`: for each dim, the numbers in a row's weights (with a first-order one if the model has it) and in its
    optimizer's state. `dim`: the current dim.
    """
    full = 4 * sum(records[dim])
    kinds = []
    for name, asked, half in [(f"dim {d}", d, False) for d in records] + [(f"dim {dim}, 16 bits a number", dim, True)]:
        weights, state = records[asked]
        record = 4 * (words(weights + state) if half else weights + state)
        rows = int(cache * full / record)
        moved = moved_at(points, rows)
        kinds.append(
            {
                "rows as": name,
                "record_bytes": record,
                "touched_bytes": touched * record,
                "cache_rows": rows,
                "moved_a_step": moved / max(1, steps),
                "bytes_a_step": moved / max(1, steps) * record,
            }
        )
    return kinds
