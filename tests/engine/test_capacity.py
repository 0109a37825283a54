"""The size of a cache: what it means, also for one of several trainers, how it is split, and what is said if it is too
small: the size that the error asks for holds every known batch, and fewer rows do not."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.engine.capacity import Capacity, DoesNotFit, parse_cache
from skirl.peers.job import using
from skirl.tools.units import parse_bytes
from tests.cases import cases
from tests.threads_as_trainers import InProcess


@pytest.mark.parametrize(
    ("text", "size"),
    [("2kB", 2000), (" 1.5 GiB ", 3 << 29), (".5MB", 500_000), ("1tib", 1 << 40)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size
    assert parse_cache(text) == ("bytes", size)


@pytest.mark.parametrize(
    "text",
    ["", "512", "10.5", "GiB", "4 XB", "-1GB", "1e3", "4GiBs", "1.2.3", "1,5GB", "0x10", "nan", "inf", "9" * 400],
)
def test_no_sizes(text):
    with pytest.raises(ValueError, match="is not a size: write it like 512MiB, 4GiB or 2GB"):
        parse_bytes(text)


def test_shares_and_rows():
    assert parse_cache("2.5 %") == ("share", 0.025)
    assert parse_cache("100%") == ("share", 1.0)
    assert parse_cache(np.int64(7)) == ("rows", 7)


@st.composite
def banks(draw: st.DrawFn) -> tuple[dict, dict]:
    count = draw(st.integers(1, 4))
    rows = [draw(st.integers(1, 10_000)) for _ in range(count)]
    distinct = [draw(st.integers(0, n)) for n in rows]
    record_bytes = [4 * draw(st.integers(1, 300)) for _ in rows]
    largest = [draw(st.integers(n > 0, n)) for n in distinct]
    facts = {"rows": rows, "record_bytes": record_bytes}
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
    slots, _ = Capacity(1000, [10**6, 10**6], [64, 32]).divide([300, 100], [100, 100], in_flight=1)
    assert slots == [100 + 600, 100 + 200]


TWO = [skirl.Table("a", 6000, 4), skirl.Table("b", 2000, 4)]
WIDTH = 20


@pytest.mark.parametrize(
    ("cache", "sites", "near", "rows"),
    [
        (100, 4, 4, 100),  # each holds as many as given
        ("10%", 1, 1, 800),
        ("10%", 4, 4, 200),  # of the 2,000 rows that each owns
        ("0.01%", 4, 4, 1),
        (f"{100 * WIDTH}B", 4, 4, 90),  # minus what is in flight
        ("auto", 1, 1, 990),  # half of the free memory
        ("auto", 2, 2, 490),  # half of that: two trainers share this memory
        ("auto", 4, 2, 490),
    ],
)
def test_of_one_trainer_among_several(cache: Any, sites: int, near: int, rows: int) -> None:
    capacity = Capacity(cache, [8000], [WIDTH], lambda: 2000 * WIDTH // near, sites)
    split = capacity.decide([[1]], [1], in_flight=10)
    assert split.slots == [rows] and split.staging_rows == [10]


def test_trainers_of_one_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skirl.engine.device.host.free_bytes", lambda: 2000 * WIDTH)

    def work(peers: InProcess) -> list[int]:
        with using(peers):
            rows = skirl.EmbeddingBagCollection(TWO, optimizer=skirl.RowwiseAdagrad(lr=0.1), cache="auto")
        return rows.engine.capacity.decide([[1]], [1], in_flight=10).slots

    assert InProcess.run(1, work) == [[990]] and InProcess.run(2, work) == [[490]] * 2


TABLES = [skirl.Table("a", 500, 4), skirl.Table("b", 500, 8), skirl.Table("c", 500, 16)]
WIDTHS = [20, 36, 68]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    banks = draw(st.integers(1, 3))
    batch = st.lists(st.integers(0, 60), min_size=banks, max_size=banks)
    return banks, draw(st.lists(batch, min_size=1, max_size=8))


def capacity(cache: int | str, banks: int) -> Capacity:
    return Capacity(cache, [500] * banks, WIDTHS[:banks], lambda: 0)


def refused(cache: int | str, banks: int, batches: list[list[int]]) -> int | str:
    error = capacity(cache, banks).refusal(batches, in_flight=8, number=0)
    found = re.search(r"set cache to (\d+) (bytes )?or more", str(error))
    assert found, error
    return f"{found[1]}B" if found[2] else int(found[1])


def holds(cache: int | str, banks: int, batches: list[list[int]]) -> bool:
    """Return whether every batch fits, both as the first of a run and after all earlier ones have decided on splits."""
    together = capacity(cache, banks)
    try:
        for batch in batches:
            capacity(cache, banks).decide([batch], batch, in_flight=8)
            together.decide([batch], batch, in_flight=8)
            together.divide(batch, batch, 8)
    except DoesNotFit:
        return False
    if banks > 1:
        return True
    slots = capacity(cache, banks).decide(batches, [60], in_flight=8).slots
    return max(batch[0] for batch in batches) <= slots[0]


@cases(200)
@given(run=runs(), in_bytes=st.booleans())
def test_what_is_asked_for_holds_every_batch(run: Any, in_bytes: bool):
    banks, batches = run
    enough = refused("1B" if in_bytes else 1, banks, batches)
    if enough == 0:  # no batch uses a row
        return
    assert holds(enough, banks, batches)
    if not in_bytes and isinstance(enough, int) and enough > 1:
        assert enough == max(sum(batch) for batch in batches)


def one_hot(ids: list[int]) -> skirl.KeyedJagged:
    return skirl.KeyedJagged.one_hot(["a"], torch.tensor(ids)[:, None])


def trained(batches: list[list[int]], cache: int | str, depth: Any = "auto") -> int:
    rows = skirl.EmbeddingBagCollection(TABLES[:1], optimizer=skirl.SGD(lr=0.1), cache=cache)
    with skirl.lookahead([one_hot(ids) for ids in batches], rows, sparse=lambda ids: ids, depth=depth) as ahead:
        for ids in ahead:
            rows(ids)["a"].sum().backward()
    return rows.engine.counters.steps


GROWING = [[*range(n)] for n in (2, 3, 4, 5, 9, 6, 2, 2, 2)]


def test_bytes_ask_for_the_largest_batch_of_the_window_and_not_for_the_next_one():
    with pytest.raises(DoesNotFit) as raised:
        trained(GROWING, "40B")
    assert str(raised.value) == (
        "cache '40B' has 24 bytes for rows and 16 for rows on their way, batch 0 needs 32, and batch 4 needs 144: set "
        "cache to 320 bytes or more ('320B'), or use smaller batches; `skirl size` says what a whole run needs"
    )
    assert trained(GROWING, "320B") == len(GROWING)
