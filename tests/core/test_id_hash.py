"""Hashes of ids: equal for equal ids, whatever holds them, and different after any change that a loop may make to them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from skirl import KeyedJagged
from skirl.core.ids import Hashes, Ids, capture, hashes_of
from tests.cases import cases

NUMBERS = st.integers(0, 3) | st.integers(0, 2**48 - 1)


@st.composite
def batches(draw) -> dict[str, list[list[int]]]:
    samples = draw(st.integers(0, 4))
    bags = st.lists(st.lists(NUMBERS, max_size=4), min_size=samples, max_size=samples)
    return draw(st.dictionaries(st.sampled_from("abc"), bags, min_size=1))


def hashes(ids: KeyedJagged) -> Hashes:
    return hashes_of(capture(ids, ()))


@cases(150)
@given(one=batches(), other=batches())
def test_equal_hashes_mean_equal_bags(one, other):
    mine, theirs = hashes(KeyedJagged.of_bags(one)), hashes(KeyedJagged.of_bags(other))
    for name in mine.keys() & theirs.keys():
        assert (mine[name][0] == theirs[name][0]) == (one[name] == other[name])


@cases(50)
@given(batch=batches())
def test_a_part_and_another_order_of_features_have_the_same(batch):
    ids = KeyedJagged.of_bags(batch)
    whole = hashes(ids)
    for names in (sorted(whole, reverse=True), sorted(whole)[:1]):
        assert hashes(ids.select(names)) == {name: whole[name] for name in names}


def test_batches_that_differ_in_one_id_differ():
    """One id in one place. A hash that is linear in the ids would mistake a 2 in one place for a 1 in another."""
    found, tried = set(), 0
    values, ends = np.zeros(1000, np.int64), np.array([0, 1000])
    for id in range(1, 201):
        for place in range(1000 // id):
            values[place] = id
            found.add(
                hashes_of(Ids(("a",), values, ends, len(ends) - 1, np.array([0, len(ends) - 1]), (None,)))["a"][0]
            )
            values[place] = 0
            tried += 1
    assert len(found) == tried


@cases(50)
@given(weights=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2))
def test_weights_have_one_of_their_own(weights):
    ids = KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor(weights))
    plain = KeyedJagged(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2]), weights=torch.tensor([0.25, 0.5]))
    mine, theirs = hashes(ids)["a"], hashes(plain)["a"]
    assert mine[0] == theirs[0] and (mine[1] == theirs[1]) == (weights == [0.25, 0.5])
