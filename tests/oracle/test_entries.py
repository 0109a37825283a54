"""Entries against a dict: found again, ranked by last position, reused, and grown by rows, not by ids."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.oracle.entries import Entries
from skirl.tables import ROW_BITS
from tests.cases import cases
from tests.oracle import brute
from tests.oracle.traces import SCHEMA, keys_of

BIG = np.int64(2) << ROW_BITS


def entries_of() -> Entries:
    return Entries(SCHEMA, SCHEMA.banks[0].tables, 100)


@cases(200)
@given(
    batches=st.lists(
        st.tuples(st.lists(st.integers(0, 20), max_size=12), st.lists(st.integers(0, 20), max_size=4, unique=True)),
        max_size=12,
    )
)
def test_entries_are_a_dict_of_rows(batches):
    """Each batch enters, then some rows are forgotten."""
    entries, held = entries_of(), {}
    for number, (ids, forgotten) in enumerate(batches):
        keys = keys_of(ids)
        found, local = entries.enter(keys, number)
        assert entries.columns.key[found].tolist() == brute.distinct(keys.tolist())
        assert entries.columns.key[found][local].tolist() == keys.tolist()
        for key, entry in zip(entries.columns.key[found].tolist(), found.tolist(), strict=True):
            assert held.setdefault(key, entry) == entry, "a row has changed its entry"
        assert len(set(held.values())) == len(held) == entries.used
        gone = [held.pop(key) for key in keys_of(forgotten).tolist() if key in held]
        entries.release(np.array(gone, np.int32))
        assert entries.used == len(held)


def test_a_small_table_has_an_array_and_a_large_one_a_hash():
    entries = entries_of()
    entries.enter(np.concatenate([keys_of(range(20)), BIG | np.arange(5)]), 0)
    assert len(entries._dense) == 40 + 7
    assert len(entries.hash) == len({*keys_of(range(1, 20, 3)).tolist(), *(BIG | np.arange(5)).tolist()})


def test_columns_survive_growth():
    entries = entries_of()
    first, _ = entries.enter(BIG | np.arange(1000), 0)
    entries.columns.clock[first] = np.arange(1000)
    entries.release(first[:10])
    second, local = entries.enter(BIG | np.arange(500, 9000), 1)
    assert entries.size == 16384
    assert entries.used == 9000 - 10
    assert np.array_equal(second[:500], first[500:])
    assert entries.columns.clock[first[10:]].tolist() == list(range(10, 1000))
    assert (entries.columns.slot == -1).all()
    assert local.tolist() == list(range(8500))
    assert len(np.unique(np.concatenate([first[10:], second]))) == entries.used


def test_room_is_made_for_rows_and_not_for_ids():
    """A batch of a hundred thousand ids of seven rows needs seven entries."""
    entries = entries_of()
    found, local = entries.enter(BIG | np.arange(100_000) % 7, 0)
    assert (entries.size, len(entries.hash.keys)) == (1024, 16)
    assert len(found) == 7 and local.max() == 6
