"""Rows in an array get the same numbers as from an index of their keys."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl.core.keys import ROW_BITS
from skirl.core.tables import Schema
from skirl.engine.access import RowNumbers

SCHEMA = Schema.of(
    [skirl.Table("a", rows=30, dim=4), skirl.Table("c", rows=9, dim=2), skirl.Table("b", rows=20, dim=4)]
)


@given(st.lists(st.lists(st.tuples(st.sampled_from([0, 2]), st.integers(0, 19)), max_size=30), max_size=6))
def test_numbers_are_those_of_the_order_in_which_rows_come(batches):
    numbers, seen = RowNumbers(SCHEMA, bank=1), {}
    for batch in batches:
        before = len(seen)
        places = [seen.setdefault(row, len(seen)) for row in batch]
        new, found = numbers.number(np.array([table << ROW_BITS | row for table, row in batch], np.int64))
        assert found.tolist() == places and len(numbers) == len(seen)
        assert new.tolist() == [table << ROW_BITS | row for table, row in list(seen)[before:]]


def test_all_rows_of_the_bank_have_an_entry_of_their_own():
    keys = np.concatenate([np.arange(30), np.arange(20) + (2 << ROW_BITS)])
    new, found = RowNumbers(SCHEMA, bank=1).number(keys)
    assert new.tolist() == keys.tolist() and found.tolist() == list(range(50))
    assert RowNumbers.nbytes(SCHEMA, 1) == 4 * 50
