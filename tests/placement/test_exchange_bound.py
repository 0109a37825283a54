"""The bound on what trainers exchange, compared with every plan of tiny batches."""

from itertools import chain, combinations, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skirl.placement.exchange import TableIds
from skirl.placement.exchange_bound import least_vectors
from tests.cases import cases


def ids_of(batch: list[list[list[int]]]) -> TableIds:
    """batch: for each trainer, the rows of each bag."""
    rows = [np.array(list(chain(*bags)), np.int64) for bags in batch]
    of = [np.repeat(np.arange(len(bags)), [len(bag) for bag in bags]) for bags in batch]
    return TableIds(rows, [len(bags) for bags in batch], of)


def least_of_all(batch: list[list[list[int]]]) -> int:
    """Try every owner of each row, and every set of rows that travels to a trainer; bags get the others in sums."""
    rows = sorted({row for bags in batch for bag in bags for row in bag})
    best = 10**9
    for choice in product(range(len(batch)), repeat=len(rows)):
        owner = dict(zip(rows, choice, strict=True))
        total = 0
        for trainer, bags in enumerate(batch):
            asked = {row for bag in bags for row in bag if owner[row] != trainer}
            total += min(
                len(sent) + sum(len({owner[row] for row in bag if row in asked and row not in sent}) for bag in bags)
                for count in range(len(asked) + 1)
                for sent in combinations(sorted(asked), count)
            )
        best = min(best, total)
    return best


BATCHES = st.lists(
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=4), min_size=2, max_size=3
)  # fmt: skip


@cases(60)
@given(BATCHES, st.integers(1, 40))
@example([[[0, 1], [0, 1]], [[0, 1], [0, 2]], [[1, 2], [0]]], 40)
@example([[[0], [0], [0]], [[0], [0]], [[0]]], 40)
def test_no_plan_goes_below_it(batch, rounds):
    assert least_vectors(ids_of(batch), rounds) <= least_of_all(batch) + 1e-9


def some_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        batch = [[rng.integers(0, 4, rng.integers(0, 4)).tolist() for _ in range(rng.integers(1, 5))] for _ in "abc"]
        assert least_vectors(ids_of(batch), 20) <= least_of_all(batch) + 1e-9


@pytest.mark.parametrize(
    ("batch", "least"),
    [
        ([[[0], [0], [1]], [[0], [1]], [[0], [1], [1]]], 4),  # rows: each goes to two of its three readers
        ([[[row] for row in range(6)], [list(range(6))]], 1),  # a sum for the one bag of the second trainer
        ([[[0, 0, 0]], [[1, 1]]], 0),
        ([[[]], [[]]], 0),
    ],
)
def test_it_is_as_high_as_a_plan_that_a_person_finds(batch, least):
    assert least_of_all(batch) == least and least_vectors(ids_of(batch)) == pytest.approx(least, abs=0.02)
