"""The advice given, on curves drawn by hand."""

import numpy as np

from skirl.sizing.size import LEAST, Point, advise, step_that_hides
from skirl.tools.units import Link

STEPS = 10


def point(cache: int, moved: int) -> Point:
    each = np.full(STEPS, moved // STEPS, np.int64)
    return Point(cache, int(each.sum()), each, each)


def drawn(**moved: list[int]) -> dict[str, list[Point]]:
    names = {"least": LEAST, "d200": "depth 200", "d50": "depth 50", "d10": "depth 10", "d1": "depth 1", "lru": "LRU"}
    return {names[name]: [point(100 * 2**i, n) for i, n in enumerate(counts)] for name, counts in moved.items()}


CURVES = drawn(
    least=[4000, 400, 100], d200=[4000, 410, 100], d50=[4000, 490, 110], d10=[5000, 900, 300], d1=[7000, 1500, 900],
    lru=[7000, 2000, 1000],
)  # fmt: skip


def test_the_smallest_cache_that_brings_in_few_and_the_smallest_depth_near_the_least():
    advice = advise(CURVES, used=10_000, touched=1000, record_bytes=68)
    assert (advice.cache, advice.depth) == (200, 50)
    assert (advice.share_of_touched, advice.moved) == (0.2, 0.049)
    sentence = advice.sentence(13_600)
    assert sentence.startswith("Use --cache 200 --depth 50: 13.3 KiB of cache on the device, 20% of the rows that are")
    assert "4.9% of the rows that batches use are refetched" in sentence


def test_a_link_and_a_step_decide_by_what_hides():
    # 100 bytes per row at 1000 bytes per second: 400 rows per step take 40 s, 41 take 4.1, 10 take 1.
    link = Link(rate=1000.0)
    assert advise(CURVES, 10_000, 1000, 100, link, 5.0).cache == 200
    assert advise(CURVES, 10_000, 1000, 100, link, 3.0).cache == 400
    assert advise(CURVES, 10_000, 1000, 100, link, 0.1).cache == 400  # which is not enough


def test_the_depth_keeps_the_reason_for_the_cache():
    close = drawn(least=[480], d200=[490], d50=[575], d10=[9000], d1=[9000], lru=[9000])
    advice = advise(close, used=10_000, touched=1000, record_bytes=68)
    assert (advice.depth, advice.moved) == (200, 0.049)  # of 50: 5.7%, close to the least, but not "at most 5%"


def test_no_cache_is_enough():
    advice = advise(CURVES, used=1000, touched=1000, record_bytes=68)
    assert advice.cache == 400


def test_nothing_comes_in_again():
    none = drawn(least=[0], d200=[0], d50=[0], d10=[0], d1=[0], lru=[0])
    advice = advise(none, used=1000, touched=100, record_bytes=68)
    assert (advice.depth, advice.moved) == (1, 0.0)


def test_what_keeps_up():
    link = Link(rate=100.0, delay=0.5)
    point = Point(9, 400, np.array([0, 0, 100, 300]), np.array([0, 0, 0, 100]))
    assert step_that_hides(point, 1.0, link) == 0.5 + 2.0
