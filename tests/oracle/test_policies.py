"""LRU, LFU and BagPipe's rule evict the same rows, in the same order, as obvious plain Python."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.bank import BankPlanner, Resident
from skirl.oracle.seen import Seen
from tests.oracle.brute import Residents
from tests.oracle.traces import drive


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
@given(
    batches=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=30),
    spare=st.integers(0, 5), depth=st.integers(1, 40), residents=st.lists(st.integers(0, 15), unique=True, max_size=10),
)  # fmt: skip
@example(batches=[[0], [1], [2], [3], [0], [4], [1], [0]], spare=1, depth=4, residents=[])
def test_the_rows_that_leave_are_those_of_the_obvious_version(policy, batches, spare, depth, residents):
    capacity = max(len(set(batch)) for batch in batches) + spare
    cached, schema = residents[:capacity], Schema.of([Table("a", 100, 4)])
    start = Resident(np.array(cached, np.int64), np.arange(len(cached), dtype=np.int32))
    planner = BankPlanner(schema, 0, capacity, depth=depth, seen=Seen(schema), policy=policy, resident=start)
    ends = [min(len(batches), t + depth) for t in range(len(batches))]
    steps = drive(planner, [np.array(batch, np.int64) for batch in batches], ends)
    wanted = Residents(capacity, policy, cached, depth).run(batches, ends)
    assert [step.evict_keys.tolist() for step in steps] == wanted
