"""Faults known from a published implementation of many trainers, by number: each is planted, and has its own tests."""

from dataclasses import dataclass
from importlib import import_module

import pytest

from tests.faults.catalogue import AREAS

BITS = "test_trainers:test_any_number_of_trainers_gives_the_bits_of_the_plain_reference"
RETURN = "test_trainers:test_rows_that_leave_and_return"
PLANTED = {fault.name for area in AREAS.values() for fault in area}


@dataclass(frozen=True)
class Known:
    """A fault of that implementation."""

    fault: str
    planted: tuple[str, ...]
    """Faults of our catalogue that are the same mistake; each of them has to be caught."""
    tests: tuple[str, ...]
    """Tests that cover it, by module and name."""


KNOWN = {
    1: Known("prefetched rows never enter the cache", ("fetched rows never enter the cache",), (RETURN,)),
    2: Known("rows that one batch uses are never trained", ("rows that occur once get no gradient",), (BITS,)),
    3: Known("a row is written back from a stale copy", ("write-back from a slot that was overwritten",), (RETURN,)),
    4: Known(
        "a window that no interval divides ends in an error",
        ("what is left of a window at the end is not trained",),
        (BITS,),  # depths 1, 20, auto and epoch, of 1 to 5 steps
    ),
    5: Known(
        "a cache that is too small blocks training for ever",
        ("a batch that one trainer cannot hold is told to nobody", "a batch larger than the cache enters"),
        ("pipeline.test_window_together:test_a_batch_that_no_split_holds_ends_all",),
    ),
    6: Known(
        "with one free slot every row is written into it",
        ("one slot is given to two rows",),
        ("test_collections:test_the_least_cache_holds_every_batch_however_its_widths_change",),
    ),
    7: Known(
        "a slow planner blocks all trainers for ever",
        ("rows and ids travel on one channel, in any order",),
        (BITS, "test_robust:test_slow_stages_slow_the_others"),  # in the first, every exchange is delayed
    ),
    8: Known(
        "optimizer state belongs to the slot and not to the row", ("optimizer state stays with the slot",), (RETURN,)
    ),
    9: Known(
        "gradients of rows are summed where dense ones are averaged",
        ("rows get the mean over the shards of one trainer", "the step's gradient is a sum over its shards"),
        (BITS,),
    ),
    10: Known(
        "the hottest rows are never written, and cannot be had",
        ("no final flush", "one owner writes nothing back"),
        (
            "test_trainers:test_a_run_that_goes_on_with_other_numbers_of_trainers",
            "checkpoint.test_parts:test_one_process_reads_the_parts_of_several",
        ),
    ),
    12: Known(
        "bags of several lengths are taken for others",
        ("bags of one feature are those of another", "an empty bag repeats the bag before"),
        (BITS,),  # of 0 to 3 ids
    ),
    13: Known(
        "loaders race, and the order of batches is another in each run",
        ("a trainer reads its shards in another order",),
        (
            "data.test_share:test_the_shards_of_all_trainers_are_the_batches_of_files",
            "data.test_share:test_workers_read_the_same_shards",
        ),
    ),
    14: Known(
        "nothing is left after a failure",
        ("a header is not synced before its rename", "one checkpoint too few is kept"),
        (
            "peers.test_groups:test_a_lost_rank_ends_the_other_with_a_sentence",
            "checkpoint.test_parts:test_a_kill_at_any_touch_of_a_file_leaves_a_whole_checkpoint",
            "checkpoint.test_parts:test_a_trainer_that_dies_while_all_save_leaves_the_checkpoint_before",
        ),
    ),
}


@pytest.mark.parametrize("number", KNOWN)
def test_each_is_planted_and_has_its_tests(number: int):
    known = KNOWN[number]
    assert known.planted and set(known.planted) <= PLANTED, f"{known.fault}: nothing like it is planted"
    assert known.tests and len(set(known.tests)) == len(known.tests)
    for test in known.tests:
        module, _, name = test.partition(":")
        assert callable(getattr(import_module(f"tests.{module}"), name)), f"{known.fault}: {test} is gone"


def test_all_are_here_and_no_two_rest_on_one_fault_alone():
    # 11 and 15 are of what skirl is compared with: benchmarks/train.py refuses modes whose losses differ.
    assert list(KNOWN) == [number for number in range(1, 15) if number != 11]
    alone = [known.planted for known in KNOWN.values() if len(known.planted) == 1]
    assert len(set(alone)) == len(alone)
