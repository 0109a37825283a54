"""Faults that a published implementation of many trainers has, by number, and the tests of ours that each would fail."""

from importlib import import_module

import pytest

BITS = "test_trainers:test_any_number_of_trainers_gives_the_bits_of_the_plain_reference"
RETURN = "test_trainers:test_rows_that_leave_and_return"
FAULTS = {
    1: ("prefetched rows never enter the cache", RETURN),
    2: ("rows that one batch uses are never trained", BITS),
    3: ("a row is written back from a stale copy", RETURN),
    4: ("a window that no interval divides ends in an error", BITS),  # depths 1, 20, auto and epoch, of 1 to 5 steps
    5: (
        "a cache that is too small blocks training for ever",
        "pipeline.test_window_together:test_a_batch_that_no_split_holds_ends_all",
        "pipeline.test_window_together:test_a_batch_that_no_split_holds_ends_all",
    ),
    6: (
        "with one free slot every row is written into it",
        "test_collections:test_the_least_cache_holds_every_batch_however_its_widths_change",
    ),
    7: (
        "a slow planner blocks all trainers for ever",
        BITS,  # every exchange naps
        "test_robust:test_slow_stages_slow_the_others",
    ),
    8: ("optimizer state belongs to the slot and not to the row", RETURN),
    9: ("gradients of rows are summed where dense ones are averaged", BITS),
    10: (
        "the hottest rows are never written, and cannot be had",
        "test_trainers:test_a_run_that_goes_on_with_other_numbers_of_trainers",
        "checkpoint.test_parts:test_one_process_reads_the_parts_of_several",
    ),
    11: (
        "what it is compared with writes nothing back",
        "measure.bench.test_train:test_all_modes_train_the_same_model",
    ),
    12: ("bags of several lengths are taken for others", BITS),  # of 0 to 3 ids
    13: (
        "loaders race, and the order of batches is another in each run",
        "data.test_share:test_the_shards_of_all_trainers_are_the_batches_of_files",
        "data.test_share:test_workers_read_the_same_shards",
    ),
    14: (
        "nothing is left after a failure",
        "peers.test_groups:test_a_lost_rank_ends_the_other_with_a_sentence",
        "checkpoint.test_parts:test_a_kill_at_any_touch_of_a_file_leaves_a_whole_checkpoint",
        "checkpoint.test_parts:test_a_trainer_that_dies_while_all_save_leaves_the_checkpoint_before",
    ),
    15: (
        "what it is compared with does other work",
        "measure.bench.test_train:test_losses_that_differ_fail_the_command",
    ),
}
"""What goes wrong there, and tests by module and name."""


@pytest.mark.parametrize("number", FAULTS)
def test_each_has_its_tests(number):
    fault, *tests = FAULTS[number]
    for test in tests:
        module, _, name = test.partition(":")
        assert callable(getattr(import_module(f"tests.{module}"), name)), f"{fault}: {test} is gone"
