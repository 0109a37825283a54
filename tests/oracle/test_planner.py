"""All banks together: how far the window reaches, also of several owners, and what that knowledge is worth: never more
fetches than LRU, and the fewest possible if the future is known."""

import zlib
from contextlib import closing
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.bank import Resident
from skirl.oracle.epoch import Epoch
from skirl.oracle.planner import LONGEST_AUTO, Plan, Planner, Vote, bank_planners, due
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.execute import Cache
from tests.oracle.traces import SCHEMA, largest, random_trace, traces, two_banks

ONE = Schema.of([Table("a", 1000, 4)])
RANDOM_TRACES, IN_A_CAMPAIGN = 400, 10_000


def made(schema: Schema, capacities: list[int], plan: Plan, seen: Seen, **options) -> Planner[None]:
    return Planner(bank_planners(schema, capacities, plan, seen, **options), plan)


def plan_all(
    schema: Schema, batches: list[list[np.ndarray]], capacities: list[int], plan: Plan, **options
) -> list[list[Step]]:
    """Return the Steps of a whole stream, by bank."""
    planner = made(schema, capacities, plan, options.pop("seen", None) or Seen(schema), **options)
    for batch in batches:
        planner.add(None, batch, 1)
    planner.end()
    return [steps for _, steps in iter(planner.next, None)]


def plan_one(trace: list[list[int]], capacity: int, plan: Plan) -> list[Step]:
    return [steps[0] for steps in plan_all(ONE, [[np.array(batch, np.int64)] for batch in trace], [capacity], plan)]


def plan_epoch(batches: list[list[np.ndarray]], capacities: list[int], residents: list[Resident] | None = None):
    """Return the Steps of a stream whose next uses come from a spool."""
    with closing(Epoch([SCHEMA])) as epoch:
        for batch in batches:
            epoch.add(batch)
        epoch.scan()
        for bank, of in enumerate(residents or ()):
            of.next_uses = epoch.first_uses(bank, of.keys)
        plan = Plan("epoch")
        banks = bank_planners(SCHEMA, capacities, plan, Seen(SCHEMA), residents=residents)
        planner: Planner[None] = Planner(banks, plan, next_uses=epoch.next_uses)
        for batch in batches:
            planner.add(None, batch, 0)
        planner.end()
        return [steps for _, steps in iter(planner.next, None)]


def test_never_more_fetches_than_lru_at_any_depth(pytestconfig):
    """The promise, on many random traces, each at a random depth, and with the smallest cache most often."""
    traces = IN_A_CAMPAIGN if pytestconfig.getoption("--hypothesis-profile") == "campaign" else RANDOM_TRACES
    rng = np.random.default_rng(20)
    better = 0
    depths = ["auto", 1, 2, 3, 4, 6, 9, 40]
    for number in range(traces):
        trace = random_trace(rng, most_rows=30)
        capacity = largest(trace) + int(rng.geometric(0.3)) - 1
        plan = Plan(depths[number % len(depths)], ramp=bool(number // len(depths) % 2))
        steps = plan_one(trace, capacity, plan)
        fetches = sum(step.fetches for step in steps)
        lru = brute.refetches(brute.lru(trace, capacity))
        assert fetches <= lru, (plan, capacity, trace)
        better += fetches < lru
    assert better > 0.3 * traces  # the window did help


@cases(150)
@given(data=st.data(), trace=traces(rows=7))
def test_brute_force_agrees_with_itself(data, trace):
    """The yardsticks below agree with each other, and with a search through every choice of victims."""
    trace = [batch[:3] for batch in trace[:9]]
    capacity = largest(trace) + data.draw(st.integers(0, 2))
    ends = [len(trace)] * len(trace)
    arrivals = brute.belady(trace, capacity)
    assert sum(map(len, arrivals)) == brute.least_arrivals(trace, capacity)
    held = min(capacity, len({key for batch in trace for key in batch}))
    assert sum(map(len, brute.victims(trace, capacity, ends))) == sum(map(len, arrivals)) - held
    nothing = list(range(1, len(trace) + 1))
    assert sum(map(len, brute.victims(trace, capacity, nothing))) == sum(map(len, brute.lru(trace, capacity))) - held


@cases(200)
@given(data=st.data(), trace=traces())
def test_the_least_fetches_of_all_when_depth_reaches_the_longest_reuse(data, trace):
    capacity = largest(trace) + data.draw(st.integers(0, 6))
    depth = brute.longest_reuse(trace) + data.draw(st.sampled_from([0, 1, 50]))
    steps = plan_one(trace, capacity, Plan(depth, ramp=False))
    assert [step.evict_keys.tolist() for step in steps] == brute.victims(trace, capacity, [len(trace)] * len(trace))
    assert sum(step.fetches for step in steps) == brute.refetches(brute.belady(trace, capacity))


@cases(200)
@given(data=st.data(), trace=traces())
def test_the_least_fetches_of_all_over_an_epoch(data, trace):
    """In each bank, and by Steps that keep their promises."""
    batches = two_banks(trace)
    sides = [[batch[bank].tolist() for batch in batches] for bank in (0, 1)]
    capacities = [largest(side) + data.draw(st.integers(0, 6)) for side in sides]
    steps = plan_epoch(batches, capacities)
    assert len(steps) == len(trace)
    for bank, side in enumerate(sides):
        cache = Cache(capacities[bank], hold=4, hold_rows=capacities[bank])
        for step, batch in zip(steps, batches, strict=True):
            cache.run(step[bank], batch[bank])
        assert cache.fetched + cache.forwarded == brute.refetches(brute.belady(side, capacities[bank]))
        wanted = brute.victims(side, capacities[bank], [len(side)] * len(side))
        assert [step[bank].evict_keys.tolist() for step in steps] == wanted


@cases(100)
@given(data=st.data(), before=traces(), trace=traces())
def test_an_epoch_knows_the_future_of_rows_that_are_resident_at_its_start(data, before, trace):
    capacity = largest([*before, *trace]) + data.draw(st.integers(0, 6))
    cache = Cache(capacity, hold=4, hold_rows=capacity)
    for step, batch in zip(plan_epoch(two_banks(before), [capacity, 99]), two_banks(before), strict=True):
        cache.run(step[0], batch[0])
    cache.next_pass()
    held = ([row[part] for row in cache.resident] for part in (0, 1))
    residents = [Resident(np.array(keys, np.int64), np.array(slots, np.int32)) for keys, slots in (held, ([], []))]
    batches = two_banks(trace)
    steps = plan_epoch(batches, [capacity, 99], residents)
    side = [batch[0].tolist() for batch in batches]
    wanted = brute.victims(side, capacity, [len(side)] * len(side), cached=residents[0].keys.tolist())
    assert [step[0].evict_keys.tolist() for step in steps] == wanted


@cases(300)
@given(
    data=st.data(), trace=traces(rows=40), depth=st.sampled_from([1, 2, 5, 30, "auto", "auto"]), ramp=st.booleans(),
    window_bytes=st.sampled_from([1, 30, 1 << 40, 1 << 40]),
)  # fmt: skip
def test_the_window_follows_its_rules(data, trace, depth, ramp, window_bytes):
    """min(depth, 2t + 8) batches; auto: until its rows are four times the cache; never more than its bytes. Victims too."""
    capacity = largest(trace) + data.draw(st.integers(0, 2))
    sizes = [zlib.crc32(bytes(batch)) % 10 for batch in trace]
    planner = made(ONE, [capacity], Plan(depth, ramp=ramp, window_bytes=window_bytes), Seen(ONE))
    for batch, size in zip(trace, sizes, strict=True):
        planner.add(None, [np.array(batch, np.int64)], size)
    planner.end()
    ends, evicted = [], []
    while planned := planner.next():
        ends.append(len(ends) + 1 + planner.window)
        evicted.append(planned[1][0].evict_keys.tolist())
        assert len(planner.rest) == len(trace) - ends[-1]
    rules: dict[str, Any] = {"depth": depth, "ramp": ramp, "window_bytes": window_bytes}
    wanted = brute.window_ends([(trace, capacity)], [sizes], **rules)
    assert ends == wanted
    assert evicted == brute.victims(trace, capacity, wanted)


@cases(100)
@given(data=st.data(), trace=traces(), depth=st.sampled_from([1, 2, 5, "auto"]), ramp=st.booleans())
def test_steps_do_not_depend_on_when_batches_come(data, trace, depth, ramp):
    batches = two_banks(trace)
    capacities = [largest([b[bank].tolist() for b in batches]) + data.draw(st.integers(0, 4)) for bank in (0, 1)]
    plan = Plan(depth, ramp=ramp)
    at_once = plan_all(SCHEMA, batches, capacities, plan)
    planner = made(SCHEMA, capacities, plan, Seen(SCHEMA))
    slowly = []
    for batch in batches:
        planner.add(None, batch, 1)
        for _ in range(data.draw(st.integers(0, 3))):
            if planned := planner.next():
                slowly.append(planned[1])
        planner.executed(len(slowly))
    planner.end()
    slowly += [steps for _, steps in iter(planner.next, None)]
    assert len(at_once) == len(slowly) == len(trace)
    for one, other in zip(at_once, slowly, strict=True):
        for bank in (0, 1):
            for name in Step.__slots__:
                assert np.array_equal(getattr(one[bank], name), getattr(other[bank], name)), name


def test_rollback_reaches_all_banks():
    seen = Seen(SCHEMA)
    planner = made(SCHEMA, [9, 9], Plan(1), seen)
    for batch in two_banks([[1, 2], [3, 4], [5, 6]]):
        planner.add(None, batch, 0)
    planner.end()
    assert len([steps for _, steps in iter(planner.next, None)]) == 3
    planner.rollback(1)
    wanted = Seen(SCHEMA)
    for part in two_banks([[1, 2]])[0]:
        wanted.add(part)
    assert np.array_equal(seen.bits, wanted.bits)


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
    planner = Planner(bank_planners(TWO, [2, 2], plan, Seen(TWO)), plan, check_fits=lambda *_: None)
    planner.due = 0
    for rows in ([1], [2], [1, 2, 3]):
        planner.add(None, [np.array(rows), np.empty(0, np.int64)], 0)
    assert planner.next() is None and planner.stopped
    assert planner.vote() == Vote(0, 2)
    planner.due = 2
    assert [planner.next() is not None for _ in range(3)] == [True, True, False]
