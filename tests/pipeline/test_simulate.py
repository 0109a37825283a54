"""The simulator's counts match the planner's Steps, and its MIN and LRU match those of brute force."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.options import Plan
from skirl.pipeline.simulate import simulate
from tests.oracle import brute

ROWS = 40
SCHEMA = Schema.of([Table("a", ROWS, 4)])
traces = st.lists(st.integers(0, ROWS - 1), min_size=6, max_size=150)
windows = st.sampled_from([1, 2, 3, 7, 20, "auto", "epoch"])


def cut(trace: list[int], batch: int) -> list[list[np.ndarray]]:
    return [[np.array(trace[i : i + batch])] for i in range(0, len(trace) - batch + 1, batch)]


@given(trace=traces, batch=st.integers(1, 6), spare=st.integers(0, 12))
def test_min_and_lru_are_those_of_brute_force(trace, batch, spare):
    capacity = batch + spare
    batches = cut(trace, batch)
    ids = [part.tolist() for (part,) in batches]
    for plan in (Plan("epoch"), Plan(len(batches), ramp=False)):
        fetched = simulate(SCHEMA, batches, [capacity], plan).fetched
        assert fetched == brute.refetches(brute.belady(ids, capacity))
    fetched = simulate(SCHEMA, batches, [capacity], Plan(3, policy="lru")).fetched
    assert fetched == brute.refetches(brute.lru(ids, capacity))


@given(trace=traces, batch=st.integers(1, 6), spare=st.integers(0, 12), depth=windows, hold=st.integers(0, 30))
def test_holding_more_evicted_rows_changes_no_count_but_forwarding(trace, batch, spare, depth, hold):
    batches = cut(trace, batch)
    without = simulate(SCHEMA, batches, [batch + spare], Plan(depth), hold_rows=[0])
    with_rows = simulate(SCHEMA, batches, [batch + spare], Plan(depth), hold_rows=[hold])
    assert without.forwarded <= with_rows.forwarded <= with_rows.fetched
    assert (without.fetched, without.new, without.written) == (with_rows.fetched, with_rows.new, with_rows.written)
