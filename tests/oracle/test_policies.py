"""LRU, LFU and BagPipe's rule evict the same rows, in the same order, as obvious plain Python."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.bank import BankPlanner, Resident
from skirl.oracle.seen import Seen

Batches = list[list[int]]


class Obvious:
    """A cache of keys under a rule: the key worth least leaves first."""

    def __init__(self, rule: str, depth: int, resident: list[int]) -> None:
        self.rule, self.interval, self.depth = rule, max(1, depth // 4), depth
        self.last = {key: i - len(resident) for i, key in enumerate(resident)}
        self.count = dict.fromkeys(resident, 1)
        self.until = dict.fromkeys(resident, -1)
        self.resident = set(resident)
        self.clock = 0

    def step(self, t: int, batches: Batches, capacity: int) -> list[int]:
        """Return the keys that leave for batch t."""
        batch = set(batches[t])
        need = max(0, len(self.resident | batch) - capacity)
        others = sorted(self.resident - batch, key=lambda key: self.worth(key, t))
        if self.rule == "ttl" and t % self.interval == 0:
            need = max(need, sum(self.until[key] < t for key in others))
        left = others[:need]
        for key in left:
            self.resident.remove(key)
            del self.count[key], self.until[key]
        window = batches[t : t + self.depth]
        for key in batches[t]:
            self.last[key] = self.clock
            self.clock += 1
        for key in batch:
            self.resident.add(key)
            self.count[key] = self.count.get(key, 0) + 1
            self.until[key] = t + max(i for i, later in enumerate(window) if key in later)
        return left

    def worth(self, key: int, t: int) -> tuple[int, ...]:
        if self.rule == "lru":
            return (self.last[key],)
        if self.rule == "lfu":
            return self.count[key], self.last[key]
        if self.until[key] < t:
            return 0, self.until[key], self.last[key]
        return 1, -self.until[key], self.last[key]


def victims(
    policy: str, batches: Batches, capacity: int, depth: int, resident: list[int], rows: int = 100
) -> list[list[int]]:
    """Return the keys that leave for each batch, by skirl's planner with its window kept full."""
    schema = Schema.of([Table("a", rows, 4)])
    start = Resident(np.array(resident, np.int64), np.arange(len(resident), dtype=np.int32))
    planner = BankPlanner(schema, 0, capacity, depth=depth, seen=Seen(schema), policy=policy, resident=start)
    out = []
    for t, batch in enumerate(batches):
        planner.enter(np.array(batch, np.int64))
        if t + 1 >= depth:
            out.append(planner.plan().evict_keys.tolist())
    while len(out) < len(batches):
        out.append(planner.plan().evict_keys.tolist())
    return out


@pytest.mark.parametrize("policy", ["lru", "lfu", "ttl"])
@given(
    batches=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=30),
    spare=st.integers(0, 5), depth=st.integers(1, 40), residents=st.lists(st.integers(0, 15), unique=True, max_size=10),
)  # fmt: skip
@example(batches=[[0], [1], [2], [3], [0], [4], [1], [0]], spare=1, depth=4, residents=[])
def test_the_rows_that_leave_are_those_of_the_obvious_version(policy, batches, spare, depth, residents):
    capacity = max(len(set(batch)) for batch in batches) + spare
    resident = residents[:capacity]
    obvious = Obvious(policy, depth, resident)
    expected = [obvious.step(t, batches, capacity) for t in range(len(batches))]
    assert victims(policy, batches, capacity, depth, resident) == expected
