"""The size of a cache, and how it is split."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.engine.capacity import Capacity, parse_cache
from skirl.tools.units import parse_bytes
from tests.cases import cases


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("2kB", 2000),
        (" 1.5 GiB ", 3 << 29),
        (".5MB", 500_000),
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
    with pytest.raises(ValueError, match="set it to a number of rows, a share like '10%', a size like '4GiB' or"):
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
    record_bytes, largest = (
        [4 * draw(st.integers(1, 300)) for _ in rows],
        [draw(st.integers(n > 0, n)) for n in distinct],
    )
    facts = {"rows": rows, "record_bytes": record_bytes, "dims": list(range(1, count + 1))}
    return facts, {"distinct": distinct, "largest": largest, "in_flight": draw(st.integers(1, 20))}


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
