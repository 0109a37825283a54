"""The site of a row, compared with a splitmix64 generator in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core.placement import SALTS, Placement
from skirl.tools.hash_index import mix as index_mix
from tests.cases import cases

keys = st.builds(lambda table, row: table << 48 | row, st.integers(0, 9), st.integers(0, (1 << 48) - 1))


def drawn(state: int, number: int) -> int:
    """Return number `number`, counted from 0, that a splitmix64 generator with this state draws."""
    z = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def test_the_generator_above_is_splitmix64():
    """Its first numbers from seed 0, as published."""
    assert [drawn(0, i) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("sites", "use", "wanted"),
    [
        (1, "ranks", [0, 0, 0, 0, 0]),
        (2, "ranks", [1, 1, 0, 1, 1]),
        (3, "ranks", [2, 1, 0, 2, 2]),
        (8, "ranks", [7, 4, 1, 6, 7]),
        (8, "sites", [0, 7, 0, 7, 0]),
        (1000, "ranks", [883, 566, 133, 772, 946]),
    ],
)
def test_where_these_rows_live_for_ever(sites, use, wanted):
    """Stores and checkpoints rely on it: a change would lose every row."""
    five = np.array([0, 1, 12345, (1 << 48) - 1, 7 << 48 | 99])
    assert Placement.even(sites, use).site_of(five).tolist() == wanted
    by_hand = [drawn(key, SALTS[use]) * sites // 2**64 for key in five.tolist()]
    assert by_hand == wanted


placements = st.builds(
    Placement,
    st.lists(st.integers(1, 1000) | st.integers(1, 1 << 29), min_size=1, max_size=7).map(tuple),
    st.sampled_from(list(SALTS)),
)


def site_by_hand(placement: Placement, key: int) -> int:
    hashed = drawn(key, SALTS[placement.use])
    return next(site for site, (begin, end) in enumerate(placement.ranges) if begin <= hashed < end)


@cases(60)
@given(placement=placements, some=st.lists(keys, max_size=12))
def test_the_range_that_the_hash_is_in(placement, some):
    assert placement.site_of(np.array(some, np.int64)).tolist() == [site_by_hand(placement, key) for key in some]
    assert Placement(**placement.facts) == placement


@cases(40)
@given(placement=placements, other=placements, some=st.lists(keys, max_size=12))
def test_who_may_have_a_site_s_rows(placement, other, some):
    met = [placement.meets(site, other) for site in range(placement.sites)]
    for key in some:
        assert site_by_hand(other, key) in met[site_by_hand(placement, key)]


@cases(60)
@given(placement=placements)
def test_ranges_are_as_wide_as_their_weights(placement):
    total = sum(placement.weights)
    assert placement.ranges[0][0] == 0 and placement.ranges[-1][1] == 2**64
    for (begin, end), weight in zip(placement.ranges, placement.weights, strict=True):
        assert abs(end - begin - 2**64 * weight / total) <= 2**12


def test_ranges_of_twice_as_many_sites_nest():
    some = np.random.default_rng(0).integers(0, 1 << 62, 20_000)
    for sites in (1, 3, 4, 32):
        few, many = Placement.even(sites), Placement.even(2 * sites)
        assert (many.site_of(some) // 2 == few.site_of(some)).all()
        assert [few.meets(site, many) for site in range(sites)] == [[2 * site, 2 * site + 1] for site in range(sites)]


def test_rows_spread_evenly_and_by_no_other_hash():
    """Rows of one rank fill the parts of its store evenly, and also the places of a hash index."""
    one_table = np.arange(200_000, dtype=np.int64)
    rank = Placement.even(8).site_of(one_table)
    mine = one_table[rank == 3]
    parts = Placement.even(8, "sites").site_of(mine)
    places = np.array([index_mix(int(key)) & 7 for key in mine[:8000].tolist()])
    for spread in (rank, parts, places):
        counts = np.bincount(spread, minlength=8)
        assert abs(counts / len(spread) * 8 - 1).max() < 0.1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: Placement.even(0), r"weights are \[\]: set each to 1 or more"),
        (lambda: Placement((1, 0)), r"weights are \[1, 0\]: set each to 1 or more"),
        (lambda: Placement((1, 1 << 32)), "all together to 2\\*\\*32 at most"),
    ],
)
def test_a_wrong_placement_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        wrong()
