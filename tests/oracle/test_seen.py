"""The record of which rows exist, compared with a set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.tables import Schema
from skirl.oracle.seen import Seen
from skirl.store import MemoryStore, Record
from tests.cases import cases

ROWS = [1, 63, 64, 65, 200, 3_000_000, 1 << 47]
SCHEMA = Schema.of([Table(f"t{i}", rows, 4 + i % 2) for i, rows in enumerate(ROWS)])

rows = st.sampled_from(range(len(ROWS))).flatmap(
    lambda t: st.one_of(st.integers(0, ROWS[t] - 1), st.sampled_from([0, ROWS[t] - 1])).map(lambda row: t << 48 | row)
)
some = st.lists(rows, max_size=30).map(lambda keys: np.array(keys, np.int64))


@cases(200)
@given(changes=st.lists(st.tuples(st.booleans(), some), max_size=8), asked=some)
def test_a_set_of_rows(changes, asked):
    seen, held = Seen(SCHEMA), set()
    for add, keys in changes:
        (seen.add if add else seen.discard)(keys)
        held = held | set(keys.tolist()) if add else held - set(keys.tolist())
    assert len(seen) == len(held)
    asked = np.concatenate([asked, *(keys for _, keys in changes)])
    assert seen.has(asked).tolist() == [key in held for key in asked.tolist()]


@cases(60)
@given(keys=some)
def test_it_begins_again_from_the_rows_of_a_store(keys):
    store, seen = MemoryStore(dict.fromkeys(range(len(ROWS)), Record(1))), Seen(SCHEMA)
    store.write(np.unique(keys), np.zeros((len(np.unique(keys)), 1), np.float32))
    seen.add(np.array([3 << 48 | 5]))  # rows from before are forgotten
    seen.clear()
    for part in store.held():
        seen.add(part)
    assert len(seen) == len(set(keys.tolist())) and seen.has(keys).all()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (1 << 48 | 63, "row 63 of table number 1, but table 't1' has rows 0 to 62 only: pass the tables, each with"),
        (5 << 48 | 3_000_000, "row 3000000 of table number 5, but table 't5' has rows 0 to 2999999 only"),
        (7 << 48 | 3, "the store holds row 3 of table number 7, but only 7 tables are given"),
        (6 << 48 | 1 << 47, "but table 't6' has rows 0 to 140737488355327"),
        (-1, "of table number -1, but only 7 tables are given"),
    ],
)
def test_rows_that_the_tables_do_not_have_are_refused(key, message):
    """They come from a store filled with larger tables, and their bits would stand for other rows."""
    seen = Seen(SCHEMA)
    with pytest.raises(ValueError, match=message):
        seen.add(np.array([0, key, 1 << 48]))
