"""An owner's rows are numbered like a list of them, and planners that number rows plan the same as ones that hash them."""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl import Table
from skirl.core.keys import key_of
from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle import row_states
from skirl.oracle.bank import BankPlanner
from skirl.oracle.row_states import RowStates
from skirl.oracle.seen import Seen
from skirl.oracle.share import Numbered, OwnedRows, number_of
from tests.cases import cases

ROWS = (5, 32, 700, 1 << 33)
SCHEMA = Schema.of([Table(f"of {rows} rows", rows, 4) for rows in ROWS])
ALL = (0, 1, 2, 3)


@st.composite
def shares(draw) -> OwnedRows:
    weights = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    return OwnedRows(Placement(tuple(weights)), draw(st.integers(0, len(weights) - 1)))


def owned(share: OwnedRows, tables: list[int]) -> list[int]:
    keys = [key_of(table, row) for table in tables for row in range(ROWS[table])]
    return [key for key, site in zip(keys, share.placement.site_of(np.array(keys, np.int64))) if site == share.site]


@cases(40)
@given(share=shares(), tables=st.permutations([0, 1, 2]))
def test_numbers_are_those_of_a_list(share, tables):
    numbered, mine = Numbered(SCHEMA, tables, share, first=7), owned(share, tables)
    assert numbered.end == 7 + len(mine)
    for table in tables:
        found = [number_of(numbered.words, numbered.begin[table], row) for row in range(ROWS[table])]
        places = {key: 7 + place for place, key in enumerate(mine)}
        assert found == [places.get(key_of(table, row), -1) for row in range(ROWS[table])]
    assert numbered.begin[3] == -1


@cases(40)
@given(share=shares(), room=st.sampled_from([0, 40, 600, 2000]), seed=st.integers(0, 99))
def test_each_row_has_a_handle_of_its_own(share, room, seed):
    """For numbered and hashed rows, in the array and outside. Rows outside the array also know their keys."""
    rng, states = np.random.default_rng(seed), RowStates(SCHEMA, ALL, room, share)
    far = np.array([key_of(3, row) for row in range(0, 1 << 33, 1 << 24)])
    far = far[share.placement.site_of(far) == share.site]
    keys = np.concatenate([np.array(owned(share, [0, 1, 2]), np.int64), far])
    given_to = dict[int, int]()
    for _ in range(3):
        some = np.unique(rng.choice(keys, 200)) if len(keys) else keys
        low = np.searchsorted(some, [key_of(table, 0) for table in (*ALL, 4)])
        out = np.empty(len(some), np.int32)
        named = states.name(np.array(ALL), some & (1 << 48) - 1, low[:-1], low, out)
        told = states.handles(some)
        for i, (key, handle) in enumerate(zip(some.tolist(), told.tolist())):
            assert given_to.setdefault(key, handle) == handle
            assert states.base[key >> 48] >= 0 or out[i] == handle
            assert states.by_key[key >> 48] >= 0 or states.key[handle] == key
            assert states.numbered.begin[key >> 48] < 0 or (named is not None and named[i] == key)
    for states_of, kind in ((states.dense, True), (states.hashed, False)):
        handles = [handle for key, handle in given_to.items() if (states.by_key[key >> 48] >= 0) == kind]
        assert len(set(handles)) == len(handles) and not states_of[handles].any()
    numbered = {0: False, 600: True, 2000: False}
    assert (states.numbered.begin[2] >= 0) == numbered.get(room, states.numbered.begin[2] >= 0)
    assert states.hashed_rows == sum(states.by_key[key >> 48] < 0 for key in given_to)


def test_a_row_of_another_owner_is_a_bug():
    share = OwnedRows(Placement.even(2), 0)
    states = RowStates(SCHEMA, (0, 2), 600, share)
    theirs = next(key for key in range(2 << 48, 2 << 48 | 700) if share.placement.site_of(np.array([key]))[0] == 1)
    assert states.numbered.begin[2] == 0
    with pytest.raises(AssertionError, match="another one"):
        states.handles(np.array([theirs]))
    with pytest.raises(AssertionError, match="another one"):
        states.name(np.array([2]), np.array([theirs & 0xFFFF]), np.array([0]), np.array([0, 1]), np.empty(1, np.int32))


@cases(20)
@given(seed=st.integers(0, 1 << 30), hold=st.integers(0, 3))
def test_what_is_planned_is_the_same(seed, hold):
    check_plans(seed, hold)


def check_plans(seed, hold):
    rng, share = np.random.default_rng(seed), OwnedRows(Placement.even(3), int(seed % 3))
    schema = Schema.of([Table("small", 7, 4), Table("large", 900, 4), Table("huge", 1 << 48, 4)])
    batches = []
    for _ in range(12):
        keys = [
            *rng.integers(0, 7, 3),
            *(1 << 48 | rng.choice([0, 420, 840]) + rng.integers(0, 60, 9)),
            *(2 << 48 | rng.integers(0, 30, 9)),
        ]
        batches.append(np.array([key for key in keys if share.placement.site_of(np.array([key]))[0] == share.site]))
    whole = Seen(schema)
    planners = [BankPlanner(schema, 0, 14, depth=3, seen=seen, hold=hold) for seen in (whole, Seen(schema))]
    for planner, of in zip(planners, (None, share), strict=True):
        planner._rows = RowStates(schema, (0, 1, 2), 300, of)
    assert planners[1]._known.numbered.begin.tolist() == [-1, 0, -1]
    for number, batch in enumerate(batches):
        for planner in planners:
            planner.enter(Positions.of(batch.astype(np.int64)))
        if number < 3:
            continue
        one, other = (planner.plan() for planner in planners)
        for a, b in zip(astuple(one), astuple(other), strict=True):
            assert np.array_equal(a, b)


def test_large_tables_are_numbered_within_bounds():
    share = OwnedRows(Placement.even(8), 3)
    schema = Schema.of([Table("a", 100, 4), Table("b", 1000, 4), Table("c", row_states.MOST_TO_NUMBER, 4)])
    assert row_states._to_number(schema, [2, 1, 0], 1000, share) == [0, 1]
    assert row_states._to_number(schema, [2, 1, 0], 1 << 40, share) == [0, 1]
    assert row_states._to_number(schema, [2], 1 << 40, share) == [2]
    assert row_states._to_number(schema, [2, 1, 0], 1000, None) == []
