"""The independent counts mean what they say: MIN is the best of all choices, LRU is LRU."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skirl.measure.bench.traffic import independent_counts

counted = independent_counts()


def best(batches: list[frozenset[int]], capacity: int) -> int:
    """Return the fewest rows brought in again, over every choice of rows to leave."""

    @cache
    def from_here(t: int, resident: frozenset[int], seen: frozenset[int]) -> int:
        if t == len(batches):
            return 0
        batch = batches[t]
        fetches = len((batch & seen) - resident)
        others = sorted(resident - batch)
        keep = min(len(others), capacity - len(batch))
        choices = combinations(others, keep)
        return fetches + min(from_here(t + 1, batch | frozenset(kept), seen | batch) for kept in choices)

    return from_here(0, frozenset(), frozenset())


@settings(max_examples=300)
@given(trace=st.lists(st.integers(0, 6), min_size=6, max_size=20), batch=st.integers(1, 3), spare=st.integers(1, 3))
def test_min_is_the_best_of_all_choices(trace, batch, spare):
    batches = [frozenset(trace[i : i + batch]) for i in range(0, len(trace) - batch + 1, batch)]
    assert counted.minimum(np.array(trace), batch, batch + spare) == best(batches, batch + spare)


@given(trace=st.lists(st.integers(0, 9), min_size=1, max_size=60), capacity=st.integers(1, 8))
def test_lru_on_batches_of_one_is_the_lru_that_everyone_knows(trace, capacity):
    stack: list[int] = []
    seen: set[int] = set()
    expected = 0
    for key in trace:
        expected += key in seen and key not in stack
        seen.add(key)
        stack = [other for other in stack if other != key][-(capacity - 1) :] if capacity > 1 else []
        stack.append(key)
    assert counted.least_recent(np.array(trace), 1, capacity) == expected


def test_lru_of_a_batch_goes_by_last_position():
    # Row 1 comes first and last in its batch: row 2 leaves, and 1 stays.
    assert counted.least_recent(np.array([1, 2, 1, 3, 3, 3, 1, 1, 1]), 3, 2) == 0
    assert counted.least_recent(np.array([1, 2, 1, 3, 3, 3, 2, 2, 2]), 3, 2) == 1


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="batch 1 has 2 distinct rows"):
        counted.minimum(np.array([1, 1, 2, 3]), 2, 1)
