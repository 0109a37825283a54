"""What to choose, from the curves: a cache, a depth, and what a smaller row would save."""

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
"""Of the rows used: so many brought in again are few."""
NEAR = 1.05
"""Times the least possible: near enough."""
HIDDEN = 1.05
"""Times the computation alone: hidden."""
CLOSE = 0.01
"""Of a cache: it is sought until none that is smaller by more would do; to the row where that is less than one."""
DEPTHS = ("depth 1", "depth 10", "depth 50", "depth 200")


@dataclass(frozen=True)
class Conditions:
    """What is asked about: how large rows are, how fast they travel, how long a step computes."""

    record_bytes: float
    """Of a row with its optimizer state; the average by touched rows where tables differ in dim."""
    prefetch: int
    link: Link | None = None
    step: float | None = None
    """Seconds."""

    def overlap(self, point: Point) -> Overlap | None:
        """How a run with this cache would go, if that can be said."""
        if self.link is None or self.step is None:
            return None
        read, written = point.read * self.record_bytes, point.written * self.record_bytes
        return overlap(read, written, self.step, self.link, self.prefetch)


@dataclass(frozen=True)
class Advice:
    """A cache, a depth, and why."""

    cache: int
    depth: int
    share_of_touched: float
    moved: float
    """Rows brought in again, of the rows that batches use;"""
    to_least: float | None
    """as many times the least possible; None where the least is none;"""
    lru: float | None
    """and what LRU brings in again, as many times ours; None where ours is none."""
    why: str

    def sentence(self, cache_bytes: float) -> str:
        """The recommendation, with its flags."""
        lru = "" if self.lru is None or self.lru < 1.05 else f"; LRU would bring in {self.lru:.1f} times as many"
        least = "the least possible" if self.to_least is None else f"{self.to_least:.2f} times the least possible"
        return (
            f"Use --cache {self.cache} --depth {self.depth}: {size(cache_bytes)} of cache on the device, "
            f"{self.share_of_touched:.0%} of the rows that are touched, {self.why}; "
            f"{self.moved:.1%} of the rows that batches use are brought in again, {least}{lru}."
        )


def goal(used: int, conditions: Conditions) -> Callable[[Point], bool]:
    """What a cache has to do: hide its movement behind the step; where that is not asked, bring in few rows again."""

    def fits(point: Point) -> bool:
        run = conditions.overlap(point)
        if run is None or conditions.step is None:
            return point.moved <= FEW * used
        return run.together <= HIDDEN * len(point.read) * conditions.step

    return fits


def smallest(
    fits: Callable[[Point], bool], tried: Sequence[Point], measure: Callable[[int], Point], least: int, most: int
) -> Point:
    """The smallest cache that `fits`, sought by bisection between those tried.

    **Arguments**

    - `fits`: what is asked of a cache; one that fits makes every larger one fit.
    - `tried`: caches that were measured, from the smallest on.
    - `measure`: measures another one.
    - `least`, `most`: rows of the smallest and of the largest that can be advised; the latter fits.

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
    """Choose of the caches on the curves by the rule above; `used`: rows that batches use, in sum."""
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
            else "the largest cache tried, and still not enough to keep what comes back"
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
    """Rows that a cache between those tried would bring in again: on a line between its neighbours.

    >>> none = np.zeros(1, np.int64)
    >>> moved_at([Point(10, none + 100, none, none), Point(20, none + 50, none, none)], 15)
    75.0
    """
    return float(np.interp(cache, [point.cache for point in points], [point.moved for point in points]))


def reductions(
    points: Sequence[Point], cache: int, dim: int, records: Mapping[int, tuple[int, int]], touched: int, steps: int
) -> list[dict[str, Any]]:
    """What smaller rows would save, the cache keeping its bytes.

    `records`: of each dim asked about, the numbers of a row's weight, with a first-order one if the model has it, and of its
    optimizer's state. `dim`: what it is now.
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
