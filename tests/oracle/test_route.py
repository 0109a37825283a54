"""Several trainers plan together: each reads what its owners serve, and every owner plans as if it were alone."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.placement import Placement
from skirl.oracle import route
from skirl.oracle.distinct import Finder
from skirl.oracle.epoch import Epoch
from skirl.oracle.planner import Plan, Planner, Vote, bank_planners
from skirl.oracle.route import Letter, joined
from skirl.oracle.seen import Seen
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.execute import Cache
from tests.oracle.trainers import BANKS, SCHEMA, Run, Trainers, asked, key_of, positions, random_ids, runs

DEPTHS = st.sampled_from([1, 2, 5, 30, "auto", "auto"])


def execute(run: Run, plan: Plan) -> None:
    """Run every Step, and check every value served, and who leaves when."""
    caches = [[Cache(capacity, hold=plan.hold, hold_rows=capacity) for capacity in of] for of in run.capacities]
    uses: dict[int, int] = defaultdict(int)
    wanted_ends = run.window_ends(plan)
    steps_of = list(Trainers(run.placement, run.capacities, plan).run(run.batches, run.nbytes))
    assert len(steps_of) == len(run.batches)
    check_victims(run, steps_of, wanted_ends)
    for number, planned in enumerate(steps_of):
        batch = run.batches[number]
        assert [item for item, *_ in planned] == [number] * run.ranks
        assert [end for *_, end in planned] == [wanted_ends[number]] * run.ranks
        for bank in range(len(BANKS)):
            served = []
            for owner, (_, own, steps, _) in enumerate(planned):
                wanted, cache = run.asked[owner][bank][number], caches[owner][bank]
                assert own.banks[bank].keys().tolist() == wanted
                cache.run(steps[bank], np.array(wanted, np.int64))
                # The value of a row is how often it was used before this step; by now it is one higher.
                served.append([(key, used - 1) for key, used in (cache.slots[s] for s in steps[bank].slots.tolist())])
            for rank, (_, own, _, _) in enumerate(planned):
                reads = own.reads[bank]
                buffer = []
                for owner, (_, theirs, _, _) in enumerate(planned):
                    begin, end = theirs.serve[bank][rank : rank + 2]
                    assert end - begin == reads.ask[owner + 1] - reads.ask[owner]
                    buffer += served[owner][begin:end]
                read = [buffer[place] for place in reads.place.tolist()]
                assert read == [(key, uses[key]) for key in batch[rank][bank]]
            for key in {key for part in batch for key in part[bank]}:
                uses[key] += 1
    assert {row for of in caches for cache in of for row in cache.uses.items()} == set(uses.items())


@cases(40)
@given(run=runs(), depth=DEPTHS, ramp=st.booleans(), window_bytes=st.sampled_from([1, 30, 1 << 40, 1 << 40]))
def test_what_is_read_is_what_is_served_and_fresh(run, depth, ramp, window_bytes):
    """And every owner evicts what a plan for its requests alone would evict."""
    execute(run, Plan(depth, ramp=ramp, window_bytes=window_bytes))


def check_victims(run: Run, planned, ends: list[int]) -> None:
    """Check that the victims are those of a plan for each owner's requests alone."""
    for owner, of in enumerate(run.capacities):
        for bank, capacity in enumerate(of):
            evicted = [step[owner][2][bank].evict_keys.tolist() for step in planned]
            assert evicted == brute.victims(run.asked[owner][bank], capacity, ends)


@cases(15)
@given(run=runs(most_ranks=4))
def test_an_epoch_is_known_to_every_owner(run):
    plan = Plan("epoch")
    first = Trainers(run.placement, run.capacities, plan)
    epochs = [Epoch([SCHEMA]) for _ in run.capacities]
    try:
        for batch in run.batches:
            for owner, epoch, letters in zip(first.owners, epochs, first.swap(batch), strict=True):
                joined = owner.together.answer(letters)
                assert joined is not None
                epoch.add(joined.banks)
        for epoch in epochs:
            epoch.scan()
        trainers = Trainers(run.placement, run.capacities, plan, [epoch.next_uses for epoch in epochs])
        planned = list(trainers.run(run.batches, run.nbytes))
    finally:
        for epoch in epochs:
            epoch.close()
    check_victims(run, planned, [len(run.batches)] * len(run.batches))


@cases(30)
@given(run=runs(most_ranks=1), depth=DEPTHS, ramp=st.booleans())
def test_both_halves_of_one_trainer_are_the_step_of_a_run_alone(run, depth, ramp):
    plan = Plan(depth, ramp=ramp, window_bytes=20)
    alone: Planner[None] = Planner(bank_planners(SCHEMA, run.capacities[0], plan, Seen(SCHEMA)), plan)
    for batch, size in zip(run.batches, run.nbytes[0], strict=True):
        alone.add(None, [positions(part) for part in batch[0]], size)
    alone.end()
    for [(_, own, steps, _)] in Trainers(run.placement, run.capacities, plan).run(run.batches, run.nbytes):
        planned = alone.next()
        assert planned is not None
        for reads, step, wanted in zip(own.reads, steps, planned[1], strict=True):
            slots = step.slots[reads.place]
            both = replace(step, slots=slots, group_start=reads.group_start, group_pos=reads.group_pos)
            for name in wanted.__slots__:
                ours, theirs = getattr(both, name), getattr(wanted, name)
                assert np.array_equal(ours, theirs) and getattr(ours, "dtype", 0) == getattr(theirs, "dtype", 0), name
    assert alone.next() is None


def two(plan: Plan, capacity: int) -> Trainers:
    return Trainers(Placement.even(2), [[capacity] * len(BANKS)] * 2, plan)


def one_row(row: int) -> list[list[int]]:
    return [[key_of(2, row)], [], []]


def test_all_end_where_the_first_has_no_more():
    trainers = two(Plan(1), capacity=3)
    first, second = (owner.together for owner in trainers.owners)
    nothing = Vote(0, 0)
    out = [first.ask([positions(part) for part in one_row(1)], nothing), second.ask(None, nothing)]
    for each, letters in zip((first, second), zip(*out, strict=True), strict=True):
        assert each.answer(list(letters)) is None
    assert first.ended and second.ended
    assert first.batch([positions(part) for part in one_row(2)], nothing) is None
    first.end(nothing)


@cases(50)
@given(seed=st.integers(0, 1 << 30), ranks=st.integers(1, 5), owner=st.integers(0, 2))
def test_what_is_asked_arrives_as_it_was_written(seed, ranks, owner):
    rng = np.random.default_rng(seed)
    batch = [random_ids(rng) for _ in range(ranks)]
    placement = Placement.even(3)
    received = []
    for part in batch:
        halves = [route.asked(Finder(SCHEMA, bank), positions(part[bank]), placement) for bank in range(len(BANKS))]
        sent = Letter(Vote(3, 1 << 40), [array for _, to in halves for array in to[owner]])
        received.append(Letter.unpacked(sent.packed()))
        assert received[-1].vote == (3, 1 << 40) and not received[-1].text
    for bank, tables in enumerate(BANKS):
        together, serve = joined(np.array(tables), [letter.arrays[2 * bank : 2 * bank + 2] for letter in received])
        wanted = [asked(part[bank], owner, placement) for part in batch]
        assert together.keys().tolist() == [key for of in wanted for key in of]
        assert serve.tolist() == np.cumsum([0, *map(len, wanted)]).tolist() and serve.dtype == np.int32


def test_rows_at_the_edges_of_their_numbers():
    rows = np.array([0, 2**31, 2**32 - 1, 2**32, 2**48 - 1, 2**31 - 1, 2**31, 2**31 - 1])
    found = Letter.unpacked(Letter(Vote(0, 0), [rows, np.array([5, 1, 2])]).packed()).arrays
    assert [array.tolist() for array in found] == [rows.tolist(), [5, 1, 2]]
