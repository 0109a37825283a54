"""The size of a cache, how it is split, and the mirror of its contents."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.engine.cache import Cache
from skirl.engine.capacity import Capacity, parse_cache
from skirl.tools.units import parse_bytes
from tests.cases import cases


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("1b", 1),
        ("2kB", 2000),
        ("2KiB", 2048),
        (" 1.5 GiB ", 3 << 29),
        (".5MB", 500_000),
        ("3TB", 3 * 10**12),
        ("1tib", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    assert parse_cache(text) == ("bytes", size)


@pytest.mark.parametrize(
    "text", ["", "GiB", "4 XB", "-1GB", "1e3", "4GiBs", "1.2.3", "1,5GB", "0x10", "nan", "inf", "9" * 400]
)
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size: write it like 512MiB, 4GiB or 2GB"):
        parse_bytes(text)
    with pytest.raises(
        ValueError, match="set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'"
    ):
        parse_cache(text)


def test_shares_and_rows():
    assert parse_cache("2.5 %") == ("share", 0.025)
    assert parse_cache("100%") == ("share", 1.0)
    assert parse_cache(np.int64(7)) == ("rows", 7)


@st.composite
def banks(draw: st.DrawFn) -> tuple[dict, dict]:
    count = draw(st.integers(1, 4))
    rows = [draw(st.integers(1, 10_000)) for _ in range(count)]
    distinct = [draw(st.integers(0, n)) for n in rows]
    return {
        "rows": rows,
        "record_bytes": [4 * draw(st.integers(1, 300)) for _ in rows],
        "dims": list(range(1, count + 1)),
    }, {
        "distinct": distinct,
        "largest": [draw(st.integers(min(1, n), n)) for n in distinct],
        "in_flight": draw(st.integers(1, 20)),
    }


sizes = st.one_of(
    st.integers(1, 20_000),
    st.integers(1, 100).map("{}%".format),
    st.integers(1, 4_000_000).map("{}B".format),
    st.integers(1, 40).map("{}MiB".format),
)


@cases(600)
@given(cache=sizes, banks=banks())
def test_a_split_gives_every_bank_what_it_needs_and_no_more_than_there_is(cache, banks):
    kind, amount = parse_cache(cache)
    banks, batches = banks
    count = len(banks["rows"])
    try:
        slots, staging = Capacity(cache, **banks).divide(**batches)
    except ValueError as refusal:
        enough = re.search(r"set cache to (\d+) (bytes )?or more", str(refusal))
        assert enough, refusal
        cache = int(enough[1]) if kind != "bytes" else f"{enough[1]}B"
        slots, staging = Capacity(cache, **banks).divide(**batches)  # the size named in the message is enough
        kind, amount = parse_cache(cache)
    assert len(slots) == len(staging) == count
    for i in range(count):
        assert 1 <= slots[i] <= banks["rows"][i]
        assert staging[i] >= 1
        if count > 1 or kind == "bytes":
            assert slots[i] >= batches["largest"][i]
    if kind == "bytes":
        used = sum((slots[i] + staging[i]) * banks["record_bytes"][i] for i in range(count))
        budget = amount
    else:
        used, budget = sum(slots), amount if kind == "rows" else max(1, int(amount * sum(banks["rows"])))
        assert staging == [max(1, batches["in_flight"] * n) for n in batches["largest"]]
    # A bank without rows in any batch still gets one slot.
    extra = sum(banks["record_bytes"][i] if kind == "bytes" else 1 for i in range(count) if not batches["largest"][i])
    assert used <= budget + extra
    # Nothing is left over that a bank could use, except for rounding.
    if any(slots[i] < banks["rows"][i] for i in range(count)):
        assert budget - used < sum(banks["record_bytes"] if kind == "bytes" else [1] * count)
    assert (slots, staging) == Capacity(cache, **banks).divide(**batches)


def test_the_rest_goes_by_demand():
    slots, _ = Capacity(1000, [10**6, 10**6], [64, 32], [16, 8]).divide([300, 100], [100, 100], in_flight=1)
    assert slots == [100 + 600, 100 + 200]


def columns(*pairs: tuple[int, int], stored: bool = False) -> tuple[np.ndarray, np.ndarray, bool]:
    keys, slots = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(keys, np.int64), np.array(slots, np.int32), stored


def test_the_mirror_knows_what_is_resident_and_since_when():
    cache = Cache(np.empty((4, 3), np.float32))
    assert (len(cache), cache.filled) == (4, 0)
    assert cache.find(np.array([7])).tolist() == [-1]
    slots = np.array([2, 0, 3], np.int32)
    cache.record(np.empty(0, np.int32), [columns((70, 2), (50, 0)), columns(), columns((60, 3))], slots)
    assert cache.filled == 3
    assert cache.resident().keys.tolist() == [70, 50, 60]
    assert cache.resident().slots.tolist() == [2, 0, 3]
    # Row 50 leaves, row 80 takes its slot, row 70 is used again, and row 60 is now the oldest.
    cache.record(np.array([0], np.int32), [columns((80, 0))], np.array([0, 2], np.int32))
    assert cache.resident().keys.tolist() == [60, 80, 70]
    assert cache.find(np.array([80, 50, 70, 60, 1 << 50])).tolist() == [0, -1, 2, 3, -1]
    cache.record(np.array([2, 3], np.int32), [], np.empty(0, np.int32))
    assert cache.resident().keys.tolist() == [80]
    assert cache.find(np.array([70, 80])).tolist() == [-1, 0]


def test_the_mirror_knows_which_rows_the_store_lacks():
    cache = Cache(np.empty((4, 3), np.float32))
    none, slots = np.empty(0, np.int32), np.array([1, 2], np.int32)
    cache.record(none, [columns((70, 2), (50, 0), stored=True), columns((60, 1))], none)
    assert cache.unwritten.tolist() == [1]
    cache.changing(slots)
    assert cache.unwritten.tolist() == [1, 2]
    cache.written(slots)
    assert cache.unwritten.tolist() == []
    cache.changing(slots)
    cache.record(slots, [columns((80, 1), stored=True)], none)  # what left was written back; slot 2 is empty
    assert cache.unwritten.tolist() == [] and cache.filled == 2
    cache.record(none, [columns((90, 2))], none)
    assert cache.unwritten.tolist() == [2]


def test_auto_takes_half_of_what_is_free_when_training_begins():
    facts = [10**6, 10**6], [64, 16], [16, 4]
    asked = Capacity("auto", *facts, free=lambda: 200_000).divide([50, 50], [9, 9], in_flight=3)
    assert asked == Capacity("100000B", *facts).divide([50, 50], [9, 9], in_flight=3)
    taken = sum((n + m) * weight for n, m, weight in zip(*asked, facts[1]))
    assert 95_000 < taken <= 100_000
