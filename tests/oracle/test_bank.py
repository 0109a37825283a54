"""One bank's planner: every Step keeps every promise, and the victims are exactly those of the rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.bank import BankPlanner, BatchTooLarge, Resident
from skirl.oracle.policies import POLICIES
from skirl.oracle.row_states import EVICTED
from skirl.oracle.seen import Seen
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.execute import Cache
from tests.oracle.traces import BANK, SCHEMA, drive, keys_of, largest, random_trace, traces, windows

NAMES = st.sampled_from(["min", *POLICIES])


def planner_of(capacity: int, **options) -> BankPlanner:
    options = {"depth": 4, "seen": Seen(SCHEMA)} | options
    return BankPlanner(SCHEMA, BANK, capacity, **options)


@cases(300)
@given(data=st.data(), trace=traces(), policy=NAMES, hold=st.integers(0, 5), hold_rows=st.sampled_from([0, 2, 99]))
def test_every_step_keeps_its_promises(data, trace, policy, hold, hold_rows):
    capacity = largest(trace) + data.draw(st.integers(0, 6))
    batches = [keys_of(batch) for batch in trace]
    planner = planner_of(capacity, policy=policy, hold=hold, hold_rows=hold_rows)
    cache = Cache(capacity, hold=hold, hold_rows=hold_rows)
    for step, batch in zip(drive(planner, batches, data.draw(windows(len(trace)))), batches, strict=True):
        cache.run(step, batch)
    assert cache.new == len({key for batch in trace for key in batch})


def test_the_traces_above_reach_every_kind_of_arrival():
    """A promise about something that never happens would be tested by nothing."""
    rng = np.random.default_rng(5)
    fetched = forwarded = 0
    for _ in range(100):
        trace = random_trace(rng)
        batches = [keys_of(batch) for batch in trace]
        cache = Cache(largest(trace), hold=2, hold_rows=3)
        planner = planner_of(cache.capacity, hold=2, hold_rows=3)
        for step, batch in zip(drive(planner, batches, [len(trace)] * len(trace)), batches, strict=True):
            cache.run(step, batch)
        fetched += cache.fetched
        forwarded += cache.forwarded
    assert fetched > 100 and forwarded > 100


FITTING = Schema.of([Table("a", 40, 4), Table("c", 12, 4)])


def fitting(trace) -> list[np.ndarray]:
    return [np.array([(i % 2) << ROW_BITS | i // 2 for i in batch], np.int64) for batch in trace]


@cases(100)
@given(data=st.data(), trace=traces(), spare=st.integers(0, 3))
def test_where_all_rows_fit_none_leaves_and_a_rollback_takes_back_what_was_planned_ahead(data, trace, spare):
    batches, seen, capacity = fitting(trace), Seen(FITTING), 52 + spare
    planner = BankPlanner(FITTING, 0, capacity, depth=4, seen=seen, hold=2, hold_rows=3)
    cache, done = Cache(capacity, hold=2, hold_rows=3), data.draw(st.integers(0, len(batches)))
    for step, batch in zip(drive(planner, batches, data.draw(windows(len(batches)))), batches[:done]):
        assert not len(step.evict_keys) + step.fetches
        cache.run(step, batch)
    planner.rollback(done)
    used = {key for batch in batches[:done] for key in batch.tolist()}
    assert {key for batch in batches for key in batch.tolist() if seen.has(np.array([key]))[0]} == used


def test_the_window_counts_a_step_that_is_planned_with_its_batch():
    (batch,) = fitting([range(20)])
    planner = BankPlanner(FITTING, 0, 52, depth=4, seen=Seen(FITTING))
    assert planner.enter(batch) == planner.plan().nbytes > 8 * len(batch)
    assert planner_of(20).enter(keys_of(range(20))) == 0


@cases(300)
@given(data=st.data(), trace=traces())
def test_victims_are_exactly_those_of_the_rule(data, trace):
    """For any window: unknown futures by least recent use, then the farthest; ties by least recent use; in this order."""
    capacity = largest(trace) + data.draw(st.integers(0, 6))
    ends = data.draw(windows(len(trace)))
    batches = [keys_of(batch) for batch in trace]
    steps = drive(planner_of(capacity), batches, ends)
    wanted = brute.victims([batch.tolist() for batch in batches], capacity, ends)
    assert [step.evict_keys.tolist() for step in steps] == wanted


@cases(100)
@given(data=st.data(), before=traces(), after=traces(), policy=st.sampled_from(["min", "lru"]))
def test_a_planner_that_adopts_a_cache_goes_on_as_the_one_that_filled_it(data, before, after, policy):
    capacity = largest([*before, *after]) + data.draw(st.integers(0, 6))
    first, second = ([keys_of(batch) for batch in trace] for trace in (before, after))
    ends = data.draw(windows(len(second)))
    seen = Seen(SCHEMA)
    planner = planner_of(capacity, policy=policy, seen=seen)
    cache = Cache(capacity, hold=4, hold_rows=capacity)
    for step, batch in zip(drive(planner, first, [len(first)] * len(first)), first, strict=True):
        cache.run(step, batch)
    seen_now = seen.bits.copy()
    kept_on = list(drive(planner, first + second, [len(first)] * len(first) + [len(first) + e for e in ends]))

    seen.bits[:] = seen_now
    cache.next_pass()
    keys, slots = (np.array(column) for column in zip(*cache.resident, strict=True)) if cache.resident else ([], [])
    resident = Resident(np.array(keys, np.int64), np.array(slots, np.int32))
    adopted = list(drive(planner_of(capacity, policy=policy, seen=seen, resident=resident), second, ends))
    for one, other, batch in zip(kept_on, adopted, second, strict=True):
        assert one.evict_keys.tolist() == other.evict_keys.tolist()
        assert one.new_keys.tolist() == other.new_keys.tolist()
        assert one.fetches == other.fetches
        cache.run(other, batch)


@cases(100)
@given(data=st.data(), trace=traces())
def test_what_is_rolled_back_never_happened(data, trace):
    seen = Seen(SCHEMA)
    batches = [keys_of(batch) for batch in trace]
    planner = planner_of(largest(trace), seen=seen)
    planned = data.draw(st.integers(0, len(trace)))
    done = data.draw(st.integers(0, planned))
    steps = drive(planner, batches, [len(trace)] * len(trace))
    for number in range(planned):
        next(steps)
        planner.executed(min(number, done))
    planner.rollback(done)
    wanted = Seen(SCHEMA)
    for batch in batches[:done]:
        wanted.add(batch)
    assert np.array_equal(seen.bits, wanted.bits)


@pytest.mark.parametrize("policy", ["min", "lru"])
def test_memory_follows_cache_and_window_however_long_the_stream(policy):
    """The rows known are exactly those resident, in the window, or evicted in the last `hold` steps."""
    rng = np.random.default_rng(1)
    capacity, window, hold = 60, 5, 3
    planner = planner_of(capacity, depth=window, hold=hold, policy=policy)
    cache = Cache(capacity, hold=hold, hold_rows=capacity)
    batches = [np.int64(2) << ROW_BITS | rng.integers(0, 5000, 25) for _ in range(1200)]
    ends = [min(len(batches), number + window) for number in range(len(batches))]
    sizes = []
    for number, step in enumerate(drive(planner, batches, ends)):
        cache.run(step, batches[number])
        wanted = {key for key, _ in cache.slots.values()}
        wanted |= {key for batch in batches[number + 1 : ends[number]] for key in batch.tolist()}
        wanted |= {key for n in range(max(0, number - hold), number + 1) for key, _ in cache.left[n]}
        assert planner._rows.hashed_rows == len(wanted)
        rows, uses = planner._rows, planner._uses
        sizes.append((len(rows.key), len(rows.index.keys), len(uses.batch) << uses.bits))
    assert len(cache.uses) > 4500
    assert sizes[-1] == (1024, 1024, 6 * 32)


def test_everything_grows_with_the_window_and_nothing_is_lost():
    """The window holds far more rows than any initial size: entries, hash, ring, lists."""
    rng = np.random.default_rng(2)
    batches = [rng.integers(0, 40, 50) for _ in range(20)]
    batches += [np.append(np.int64(2) << ROW_BITS | rng.integers(0, 20_000, 3000), [5, 39]) for _ in range(30)]
    capacity = 4000
    planner = planner_of(capacity)
    cache = Cache(capacity, hold=4, hold_rows=capacity)
    for step, batch in zip(drive(planner, batches, [8, 9] + [50] * 48), batches, strict=True):
        cache.run(step, batch)
    trace = [batch.tolist() for batch in batches]
    assert cache.fetched + cache.forwarded == brute.refetches(brute.belady(trace, capacity)) > 10_000


def test_a_batch_too_large_is_named_when_it_enters():
    schema = Schema.of([Table("a", 100, 16), Table("b", 100, 4)])
    planner = BankPlanner(schema, 1, 3, depth=2, seen=Seen(schema))
    planner.enter(np.array([1, 2, 3]))
    with pytest.raises(BatchTooLarge) as raised:
        planner.enter(np.array([4, 5, 6, 7, 4]))
    assert str(raised.value) == (
        "batch 1 needs 4 rows together, the cache holds 3: set cache to 4 rows or more, or use smaller batches"
    )


def test_an_old_eviction_is_not_taken_for_a_late_one_when_numbers_come_round():
    """A row in the array of states keeps the number of its eviction; after 2**30 others, another row has the same number."""
    planner = planner_of(2, hold=2, depth=1)
    cache = Cache(2, hold=2, hold_rows=2)
    batches = [keys_of(ids) for ids in ([0], [3], [6], [9], [12], [15], [0], [3])]
    for number, batch in enumerate(batches):
        planner.enter(batch)
        if number == 6:  # row 0 left long ago: pretend that its number equals that of the row which left last
            states = planner._rows.dense
            handle = planner._uses.handle[planner._window[0].place]
            assert states[handle] > 0
            place = planner._window[0].place
            assert planner._uses.slot[place] < -EVICTED
            planner._uses.slot[place] = -EVICTED - 1 - ((planner._evictions - 1) & (EVICTED - 1))
        cache.run(planner.plan(), batch)
    assert cache.fetched == 2 and cache.forwarded == 0
