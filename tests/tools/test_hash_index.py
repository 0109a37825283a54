import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.tools.hash_index import EMPTY, HashIndex, distinct, find, insert, mix, probe, remove

# Few distinct keys, spread over all bits: collisions, removals of existing keys, and equal halves are common.
KEYS = st.one_of(
    st.integers(0, 40),
    st.builds(lambda table, row: table << 48 | row, st.integers(0, 3), st.integers(0, 9)),
    st.sampled_from([(1 << 63) - 1, (1 << 48) - 1, 1 << 48, 1 << 32, 1 << 31]),
)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "drop", "get"]), st.lists(KEYS, max_size=12)))


def int64(keys) -> np.ndarray:
    return np.array(keys, np.int64)


def whole(index: HashIndex, expected: dict[int, int]) -> None:
    """Check that every key is found with its value, nothing else is there, and every run of places is unbroken."""
    assert len(index) == len(expected) == np.count_nonzero(index.keys != EMPTY)
    assert 2 * len(index) <= index.keys.size
    assert dict(zip(*(a[index.keys != EMPTY].tolist() for a in (index.keys, index.values)), strict=True)) == expected
    for place, key in enumerate(index.keys.tolist()):
        if key != EMPTY:
            assert probe(index.keys, index.mask, key) == place


@given(OPERATIONS)
def test_agrees_with_a_dict(operations):
    index, expected, fresh = HashIndex(), {}, 0
    for name, keys in operations:
        if name == "put":
            values = np.arange(fresh, fresh + len(keys), dtype=np.int32)
            fresh += len(keys)
            seen = [key in expected or key in keys[:n] for n, key in enumerate(keys)]
            expected.update(zip(keys, values.tolist(), strict=True))
            assert index.put(int64(keys), values).tolist() == seen
        elif name == "drop":
            index.drop(int64(keys))
            expected = {key: value for key, value in expected.items() if key not in keys}
        elif name == "get":
            assert index.get(int64(keys)).tolist() == [expected.get(key, -1) for key in keys]
        whole(index, expected)


@given(st.lists(KEYS, max_size=60))
def test_distinct_keys_come_in_the_order_of_first_appearance(keys):
    expected = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    found, place = distinct(int64(keys))
    assert found.tolist() == list(expected)
    assert place.tolist() == [expected[key] for key in keys]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), min_size=20, max_size=200))
def test_kernels_in_a_small_full_index(operations):
    """16 places and up to 15 keys give long runs around the end, where moving entries back goes wrong first."""
    index, expected = HashIndex(), {}
    for put, key in operations:
        if put and (len(expected) < 15 or key in expected):
            assert insert(index.keys, index.values, index.mask, key, key + 1) == (key not in expected)
            expected[key] = key + 1
        else:
            assert remove(index.keys, index.values, index.mask, key) == expected.pop(key, -1)
        for k in range(31):
            assert find(index.keys, index.values, index.mask, k) == expected.get(k, -1)
    assert np.count_nonzero(index.keys != EMPTY) == len(expected)


@pytest.mark.parametrize("shift", [0, 4, 12, 20, 31, 48])
def test_keys_spread_whatever_their_pattern(shift):
    """Random places would take 1.5 probes at half full; a pattern that survives the mixing takes many."""
    keys = np.arange(1 << 13, dtype=np.int64) << shift
    index = HashIndex()
    index.put(keys, np.arange(keys.size, dtype=np.int32))
    homes = np.array([mix(key) & index.mask for key in index.keys[index.keys != EMPTY]])
    away = (np.flatnonzero(index.keys != EMPTY) - homes) & index.mask
    assert index.keys.size == 1 << 14
    assert 1.4 < 1 + away.mean() < 1.6
