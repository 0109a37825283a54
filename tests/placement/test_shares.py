"""The least time of the busiest site, compared with what no placement can beat: bounds from each set of sites."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.placement.shares import NoRoom, least_busy
from tests.cases import cases


def bound(moved, held, rates, caps) -> float:
    """Compute the bound by hand: whatever some sites hold, the others move the rest; the largest of these over all sets."""
    most = 0.0
    for count in range(len(rates)):
        for some in combinations(range(len(rates)), count):
            room, gone = sum(caps[s] for s in some), 0.0
            for load, size in sorted(zip(moved, held), key=lambda t: -t[0] / t[1]):
                part = min(1.0, room / size)
                gone, room = gone + part * load, room - part * size
            most = max(most, (sum(moved) - gone) / sum(r for s, r in enumerate(rates) if s not in some))
    return most


tables = st.lists(st.tuples(st.floats(0, 1e6), st.floats(1, 1e6)), min_size=1, max_size=6)
sites = st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 10)), min_size=1, max_size=5)


@cases(200)
@given(tables=tables, sites=sites, full=st.floats(0.05, 1))
def test_no_placement_is_faster_and_no_cap_is_exceeded(tables, sites, full):
    moved, held = (np.array(part) for part in zip(*tables))
    rates, caps = (np.array(part) for part in zip(*sites))
    caps *= held.sum() / caps.sum() / full * (1 + 1e-9)
    shares, seconds = least_busy(moved, held, rates, caps)
    assert (shares >= 0).all() and np.allclose(shares.sum(axis=1), 1)
    assert (held @ shares <= caps * (1 + 1e-6) + 1e-6).all()
    assert seconds <= bound(moved, held, rates, caps) * (1 + 1e-5) + 1e-9
    order = np.random.default_rng(0).permutation(len(moved))
    again, same = least_busy(moved[order], held[order], rates, caps)
    assert same == pytest.approx(seconds, rel=1e-5)
    if len(set(moved / held)) == len(moved):  # tables of equal density could be swapped
        assert np.allclose(again, shares[order], atol=1e-5)


def test_room_for_all_is_shared_by_rate():
    shares, seconds = least_busy([5, 3], [1, 9], [4, 2, 1, 1], [np.inf] * 4)
    assert np.allclose(shares, [[0.5, 0.25, 0.125, 0.125]] * 2) and seconds == pytest.approx(1)


def test_a_small_fast_site_takes_what_moves_most():
    shares, seconds = least_busy([90, 10], [10, 90], [9, 1], [10, 90])
    assert shares.round(6).tolist() == [[1, 0], [0, 1]] and seconds == pytest.approx(10)


def test_rows_that_do_not_fit():
    with pytest.raises(NoRoom, match="rows take 30 bytes, all sites together hold 25"):
        least_busy([1, 2], [10, 20], [1, 1], [10, 15])
