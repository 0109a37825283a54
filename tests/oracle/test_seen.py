"""The record of which rows exist, compared with a set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import skirl
from skirl import Table
from skirl.core.keys import row_of, table_of
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


@cases(50)
@given(parts=st.lists(some, max_size=3))
def test_rows_of_several(parts):
    seen = Seen(SCHEMA)
    for keys in parts:
        other = Seen(SCHEMA)
        other.add(keys)
        seen.include(other)
    everything = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    assert len(seen) == len(everything) and seen.has(everything).all()


def test_rebuilt_from_a_store():
    seen = Seen(SCHEMA)
    seen.add(np.array([2 << 48 | 5]))
    seen.rebuild([np.array([1 << 48 | 62, 0]), np.empty(0, np.int64), np.array([5 << 48 | 2_999_999])])
    assert len(seen) == 3
    assert seen.has(np.array([2 << 48 | 5, 1 << 48 | 62, 0, 5 << 48 | 2_999_999])).tolist() == [
        False,
        True,
        True,
        True,
    ]


class Bitmaps(MemoryStore):
    """A store that reports the rows it holds as bits, for every table, in pieces or at once."""

    def held(self):
        for keys in super().held():
            for table in np.unique(table_of(keys)).tolist():
                held = row_of(keys[table_of(keys) == table])
                held = held[held < 1 << 20]  # the bits of a row of 2**47 would not fit in memory: it comes as a key
                words = np.zeros(int(held.max(initial=-1)) // 64 + 2, np.uint64)
                np.bitwise_or.at(words, held // 64, np.uint64(1) << (held % 64).astype(np.uint64))
                yield table, words
            yield keys[row_of(keys) >= 1 << 20]


@cases(60)
@given(keys=some)
def test_a_store_that_answers_with_bits_gives_the_same(keys):
    seen = []
    for kind in (MemoryStore, Bitmaps):
        store = kind(dict.fromkeys(range(len(ROWS)), Record(1)))
        store.write(np.unique(keys), np.zeros((len(np.unique(keys)), 1), np.float32))
        seen.append(Seen(SCHEMA))
        seen[-1].add(np.array([3 << 48 | 5]))  # rows from before are forgotten
        seen[-1].rebuild(store.held())
    assert seen[0].bits.tobytes() == seen[1].bits.tobytes()
    assert len(seen[0]) == len(seen[1]) == len(set(keys.tolist()))
    assert seen[1].has(keys).all()


def test_the_bits_of_an_engine_are_what_its_store_says(monkeypatch):
    """An engine that opens a store asks for `held` and nothing else."""
    store = Bitmaps({0: Record(4)})
    store.write(np.array([3, 99]), np.ones((2, 4), np.float32))
    monkeypatch.setattr(Bitmaps, "keys", lambda self: pytest.fail("the keys were streamed"))
    monkeypatch.setattr(Bitmaps, "held", lambda self: iter([(0, np.array([8, 1 << 35], np.uint64))]))
    rows = skirl.EmbeddingBagCollection([Table("a", 100, 4)], optimizer=skirl.SGD(), cache=10, store=store, resume=True)
    assert rows.engine.seen.has(np.array([3, 99, 4])).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (1 << 48 | 63, "row 63 of table 't1', but the table has rows 0 to 62 only: give it as many rows as it had"),
        (5 << 48 | 3_000_000, "row 3000000 of table 't5', but the table has rows 0 to 2999999 only"),
        (7 << 48 | 3, "the store holds row 3 of table number 7, but there are only 7 tables"),
        (6 << 48 | 1 << 47, "of table 't6', but the table has rows 0 to 140737488355327"),
        (-1, "of table number -1, but there are only 7 tables"),
    ],
)
def test_rows_that_the_tables_do_not_have_are_refused(key, message):
    """They come from a store filled with larger tables, and their bits would stand for other rows."""
    seen = Seen(SCHEMA)
    with pytest.raises(ValueError, match=message):
        seen.rebuild([np.array([0, key, 1 << 48])])
