"""A cache that is too small: the size that the error asks for holds every known batch, and fewer rows do not."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.core.tables import Schema
from skirl.engine.capacity import Capacity, DoesNotFit
from tests.cases import cases

TABLES = [skirl.Table("a", 500, 4), skirl.Table("b", 500, 8), skirl.Table("c", 500, 16)]
WIDTHS = [20, 36, 68]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    banks = draw(st.integers(1, 3))
    batch = st.lists(st.integers(0, 60), min_size=banks, max_size=banks)
    return banks, draw(st.lists(batch, min_size=1, max_size=8))


def capacity(cache: int | str, banks: int) -> Capacity:
    return Capacity.of(cache, Schema.of(TABLES[:banks]), WIDTHS[:banks], lambda: 0)


def refused(cache: int | str, banks: int, batches: list[list[int]]) -> int | str:
    """Return the cache size that the error asks for."""
    error = capacity(cache, banks).refusal(batches, in_flight=8, number=0)
    found = re.search(r"set cache to (\d+) (bytes )?or more", str(error))
    assert found, error
    return f"{found[1]}B" if found[2] else int(found[1])


def holds(cache: int | str, banks: int, batches: list[list[int]]) -> bool:
    """Return whether every batch fits, both as the first of a run and after all earlier ones have decided on splits."""
    together = capacity(cache, banks)
    try:
        for batch in batches:
            capacity(cache, banks).decide([batch], batch, in_flight=8, number=0)
            together.decide([batch], batch, in_flight=8, number=0)
            together.divide(batch, batch, 8)
    except DoesNotFit:
        return False
    if banks > 1:
        return True
    slots = capacity(cache, banks).decide(batches, [60], in_flight=8, number=0).slots
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
        "cache '40B' has 24 bytes for rows and 16 for staging (rows on their way, at most half), batch 0 needs 32, and "
        "batch 4 needs 144, the most of the 8 batches read so far: set cache to 320 bytes or more ('320B'), or use smaller "
        "batches; `skirl size` says what a whole run needs"
    )
    assert trained(GROWING, "320B") == len(GROWING)
