"""Advice from the curves: a cache and a depth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skirl.sizing.curve import LEAST, Point
from skirl.tools.units import Link, size

FEW = 0.05
"""A cache refetches few rows if they are at most this share of the rows used."""
NEAR = 1.05
"""A depth is near enough if it refetches at most this many times the least possible."""
DEPTHS = ("depth 1", "depth 10", "depth 50", "depth 200")


def step_that_hides(point: Point, record_bytes: float, link: Link) -> float:
    """Return the seconds that a step must take for the link to keep up with this cache."""
    half = len(point.read) // 2  # on average over the run's second half
    parts = (part[half:] * record_bytes for part in (point.read, point.written))
    return max((link.seconds(int(part.mean())) for part in parts if len(part)), default=0.0)


@dataclass(frozen=True)
class Advice:
    """A recommended cache and depth, and why."""

    cache: int
    depth: int
    share_of_touched: float
    moved: float
    """Rows refetched, as a share of the rows that batches use."""
    to_least: float | None
    """The same as a multiple of the least possible; None if that is 0 and this is not."""
    lru: float | None
    """Rows that LRU refetches, as a multiple of ours; None if ours is 0."""
    why: str

    def sentence(self, cache_bytes: float) -> str:
        """Return the recommendation as a sentence, with the flags to set."""
        lru = "" if self.lru is None or self.lru < 1.05 else f"; LRU would refetch {self.lru:.1f} times as many"
        least = "" if self.to_least is None else f", {self.to_least:.2f} times the least possible"
        return (
            f"Use --cache {self.cache} --depth {self.depth}: {size(cache_bytes)} of cache on the device, "
            f"{self.share_of_touched:.0%} of the rows that are touched, {self.why}; "
            f"{self.moved:.1%} of the rows that batches use are refetched{least}{lru}."
        )


def advise(
    curves: Mapping[str, Sequence[Point]], used: int, touched: int, record_bytes: float, link: Link | None = None,
    step: float | None = None,
) -> Advice:  # fmt: skip
    """Choose the smallest cache on the curves that is good enough, and the least depth that is near the least possible.

    `used`: rows that batches use, in total. `record_bytes`: of a row with its optimizer state, on average over the touched
    ones. `step`: seconds that a step computes.
    """

    def fits(point: Point) -> bool:
        """Return whether the link keeps up with the step or, if one is unknown, few rows are refetched."""
        if link is None or step is None:
            return point.moved <= FEW * used
        return step_that_hides(point, record_bytes, link) <= step

    few = f"{FEW:.0%} of the rows used"
    reasons = (
        f"the smallest cache tried that refetches at most {few}",
        f"the largest cache tried, which still refetches more than {few}",
    )
    if link is not None and step is not None:
        reasons = (
            "the smallest cache whose movement hides behind the step",
            "the largest cache tried, and the link is too slow for this step",
        )
    deepest = curves["depth 200"]
    chosen = next((i for i, point in enumerate(deepest) if fits(point)), len(deepest) - 1)
    enough_cache = fits(deepest[chosen])
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
        to_least=ours.moved / least if least else None if ours.moved else 1.0,
        lru=lru / ours.moved if ours.moved else None,
        why=reasons[0 if enough_cache else 1],
    )
