"""When a window of several owners is full, by what each reports: compared step by step with a rule that sees them all."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.options import LONGEST_AUTO, Plan, Vote, due
from skirl.oracle.planner import Planner, bank_planners
from skirl.oracle.seen import Seen
from tests.cases import cases
from tests.oracle.traces import largest, traces

TWO = Schema.of([Table("a", 1000, 4), Table("b", 1000, 8)])


@cases(150)
@given(
    votes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5), window=st.integers(0, 9),
    planned=st.integers(0, 5), depth=st.sampled_from([1, 3, 8, "auto", "epoch"]), ramp=st.booleans(),
)  # fmt: skip
def test_steps_are_due_while_the_window_is_full(votes, window, planned, depth, ramp):
    steps = due(Plan(depth, ramp=ramp), window, planned, [Vote(*vote) for vote in votes])

    def full(n: int) -> bool:
        left = window - n
        if depth == "auto":
            by_depth = all(rows > n for rows, _ in votes)
        else:
            by_depth = left >= (1 if depth == "epoch" else depth)
        return left > 0 and (
            any(memory > n for _, memory in votes) or (ramp and left >= 2 * (planned + n) + 8) or by_depth
        )

    assert [full(n) for n in range(steps + 1)] == [True] * steps + [False]


def test_the_longest_window():
    assert due(Plan(ramp=False), LONGEST_AUTO + 1, 0, [Vote(0, 0)]) == 2


@cases(50)
@given(
    trace=traces(rows=30), other=traces(rows=30), depth=st.sampled_from(["auto", 3]), most=st.sampled_from([9, 1 << 40])
)
def test_an_owner_says_for_how_many_steps_its_window_stays_full(trace, other, depth, most):
    length = min(len(trace), len(other))
    trace, other = trace[:length], other[:length]
    capacities, plan = [largest(trace), largest(other)], Plan(depth, window_bytes=most)
    planner: Planner[None] = Planner(bank_planners(TWO, capacities, plan, Seen(TWO)), plan)
    planner.due = 0
    sizes = [len(batch) for batch in trace]
    for batch, theirs, size in zip(trace, other, sizes, strict=True):
        planner.add(None, [np.array(batch, np.int64), np.array(theirs, np.int64) | 1 << 48], size)
    assert planner.next() is None and planner.window == length
    planner.due = length
    for first in range(length):

        def enough(n: int) -> bool:
            return all(
                len({row for batch in part[n:] for row in batch}) >= 4 * capacity
                for part, capacity in zip((trace, other), capacities, strict=True)
            )

        rows = next((n for n in range(first, length) if not enough(n)), length) - first
        memory = next((n for n in range(first, length) if sum(sizes[n:]) < most), length) - first
        assert planner.vote() == Vote(rows if depth == "auto" else 0, memory)
        assert planner.next() is not None
    assert planner.vote() == Vote(0, 0) and planner.next() is None


def test_an_owner_that_has_no_room_lets_all_others_plan_what_it_has():
    plan = Plan(9)
    planner = Planner(bank_planners(TWO, [2, 2], plan, Seen(TWO)), plan, may_stop=True)
    planner.due = 0
    for rows in ([1], [2], [1, 2, 3]):
        planner.add(None, [np.array(rows), np.empty(0, np.int64)], 0)
    assert planner.next() is None and planner.stopped is not None
    assert planner.vote() == Vote(0, 2)
    planner.due = 2
    assert [planner.next() is not None for _ in range(3)] == [True, True, False]
