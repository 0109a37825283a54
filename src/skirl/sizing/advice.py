"""Advice from the curves: a cache and a depth; and how much of the movement hides behind computation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from skirl.sizing.curve import LEAST, Point
from skirl.tools.progress import size
from skirl.tools.units import Link

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
class Overlap:
    """Estimated seconds of a run."""

    together: float
    """Time with movement in parallel to computation."""
    serial: float
    """Time with movement and computation in sequence."""
    roof: float
    """Time that no overlap could beat: computation alone, or the link alone."""

    @property
    def hidden(self) -> float:
        """Share of the hideable time that is hidden, at most 1.

        >>> Overlap(together=1.25, serial=2.0, roof=1.0).hidden
        0.75
        """
        room = self.serial - self.roof
        return 1.0 if room <= 0 else (self.serial - self.together) / room


def overlap(
    read: Sequence[float] | np.ndarray, written: Sequence[float] | np.ndarray, step: float, link: Link, prefetch: int
) -> Overlap:
    """Estimate a run whose steps read and write these bytes and compute for `step` seconds each.

    >>> overlap([0, 100, 100], [0, 0, 100], step=1.0, link=Link(rate=100.0), prefetch=2)
    Overlap(together=3.0, serial=6.0, roof=3.0)
    """
    steps = len(read)
    ends = np.zeros(steps + 1)  # when each step's computation ends, after the start of the run
    arrived = wrote = 0.0
    takes_read, takes_write = ([link.seconds(int(n)) if n else 0.0 for n in bytes_] for bytes_ in (read, written))
    for t in range(steps):
        asked = ends[max(0, t - prefetch)]  # its rows are asked for when the step `prefetch` before it begins
        arrived = max(arrived, asked) + takes_read[t]
        ends[t + 1] = max(ends[t], arrived) + step
        wrote = max(wrote, ends[t]) + takes_write[t]
    computing = steps * step
    serial = computing + sum(takes_read) + sum(takes_write)
    busiest = max(sum(map(float, read)), sum(map(float, written))) / link.rate
    return Overlap(float(max(ends[-1], wrote)), serial, max(computing, busiest))


def step_that_hides(read: np.ndarray, written: np.ndarray, link: Link) -> float:
    """Return the seconds that a step must take for the link to keep up, on average over the run's second half."""
    half = len(read) // 2
    return max((link.seconds(int(part[half:].mean())) for part in (read, written) if len(part[half:])), default=0.0)


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

    `tried` goes from the smallest on. If one cache fits, so does every larger one; `most` fits.

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
