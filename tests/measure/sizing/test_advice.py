"""What is advised, on curves drawn by hand."""

import numpy as np
import pytest

from skirl.measure.sizing.advice import Conditions, advise, moved_at, reductions
from skirl.measure.sizing.curve import LEAST, Point
from skirl.store.link import Link

STEPS = 10


def point(cache: int, moved: int) -> Point:
    each = np.full(STEPS, moved // STEPS, np.int64)
    return Point(cache, each, each, each)


def drawn(**moved: list[int]) -> dict[str, list[Point]]:
    names = {"least": LEAST, "d200": "depth 200", "d50": "depth 50", "d10": "depth 10", "d1": "depth 1", "lru": "LRU"}
    return {names[name]: [point(100 * 2**i, n) for i, n in enumerate(counts)] for name, counts in moved.items()}


CURVES = drawn(
    least=[4000, 400, 100], d200=[4000, 410, 100], d50=[4000, 490, 110], d10=[5000, 900, 300], d1=[7000, 1500, 900],
    lru=[7000, 2000, 1000],
)  # fmt: skip


def test_the_smallest_cache_that_brings_in_few_and_the_smallest_depth_near_the_least():
    advice = advise(CURVES, used=10_000, touched=1000, conditions=Conditions(68, 2))
    assert (advice.cache, advice.depth) == (200, 50)
    assert (advice.share_of_touched, advice.moved) == (0.2, 0.049)
    assert advice.to_least == pytest.approx(490 / 400) and advice.lru == pytest.approx(2000 / 490)
    sentence = advice.sentence(13_600)
    assert sentence.startswith("Use --cache 200 --depth 50: 13.3 KiB of cache on the device, 20% of the rows that are")
    assert "4.9% of the rows that batches use are brought in again" in sentence
    assert "LRU would bring in 4.1 times as many" in sentence


def test_a_link_and_a_step_decide_by_what_hides():
    # 100 bytes a row at 1000 bytes a second: 400 rows a step take 40 s, 41 take 4.1, 10 take 1.
    slow, fast = (Conditions(100, 2, Link(rate=1000.0), step) for step in (3.0, 50.0))
    assert advise(CURVES, 10_000, 1000, fast).cache == 200
    assert advise(CURVES, 10_000, 1000, slow).cache == 400
    hopeless = advise(CURVES, 10_000, 1000, Conditions(100, 2, Link(rate=1000.0), 0.1))
    assert hopeless.cache == 400 and "the link is too slow for this step" in hopeless.why


def test_the_depth_keeps_the_reason_for_the_cache():
    close = drawn(least=[480], d200=[490], d50=[575], d10=[9000], d1=[9000], lru=[9000])
    advice = advise(close, used=10_000, touched=1000, conditions=Conditions(68, 2))
    assert (advice.depth, advice.moved) == (
        200,
        0.049,
    )  # 5.7% of a window of 50 would be near the least, and not "at most 5%"


def test_no_cache_is_enough():
    advice = advise(CURVES, used=1000, touched=1000, conditions=Conditions(68, 2))
    assert advice.cache == 400 and "still not enough" in advice.why


def test_nothing_comes_in_again():
    none = drawn(least=[0], d200=[0], d50=[0], d10=[0], d1=[0], lru=[0])
    advice = advise(none, used=1000, touched=100, conditions=Conditions(68, 2))
    assert (advice.depth, advice.moved, advice.to_least, advice.lru) == (1, 0.0, None, None)
    assert "the least possible" in advice.sentence(1)


def test_smaller_rows_in_the_same_bytes():
    points = CURVES["depth 200"]
    whole, half, fp16 = reductions(
        points, cache=100, dim=15, records={15: (15, 1), 7: (7, 1)}, touched=1000, steps=STEPS
    )
    assert (whole["record_bytes"], half["record_bytes"], fp16["record_bytes"]) == (64, 32, 32)
    assert (whole["cache_rows"], half["cache_rows"], fp16["cache_rows"]) == (100, 200, 200)
    assert (whole["moved_a_step"], half["moved_a_step"]) == (400, 41)
    odd = reductions(points, cache=100, dim=16, records={16: (16, 1)}, touched=1000, steps=STEPS)[1]
    assert (odd["record_bytes"], odd["cache_rows"]) == (36, 188), "a record of halves is of whole words"
    assert odd["moved_a_step"] == moved_at(points, 188) / STEPS == pytest.approx((4000 - 0.88 * 3590) / STEPS)
    assert half["bytes_a_step"] == 41 * 32 and half["touched_bytes"] == 32_000
