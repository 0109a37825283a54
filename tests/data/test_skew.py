"""The power law is the documented one, and its hot rows may be anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.data.files.hashing import unit
from skirl.data.synthetic import EXPONENT, OFFSET, bits_for, mass_of, rank_at, scatter
from tests.cases import cases


def rows_by_rank(rows: int, key: int, ranks: int | None = None) -> np.ndarray:
    """Return the row of each rank, hottest first."""
    bits = np.uint64(bits_for(rows))
    return np.array([scatter(rank, rows, bits, np.uint64(key)) for rank in range(ranks or rows)])


def share(rows: int, below: np.ndarray) -> np.ndarray:
    """Return the share of accesses that go to ranks below some, from the integral of the density."""

    def integral(x: np.ndarray) -> np.ndarray:
        return (x + OFFSET) ** (1 - EXPONENT) - OFFSET ** (1 - EXPONENT)

    return integral(below) / integral(np.array(float(rows)))


@pytest.mark.parametrize("rows", [1, 2, 3, 50, 5683, 10_131_227, 292_775_614, 2**48])
def test_ranks_follow_the_density(rows: int) -> None:
    draws = 100_000
    mass = mass_of(rows)
    ranks = np.array([rank_at(unit(np.uint64(5), np.uint64(i)), rows, mass) for i in range(draws)])
    assert 0 <= ranks.min() <= ranks.max() < rows
    edges = np.unique(np.geomspace(1, rows, 12).astype(np.int64))
    measured = np.array([np.mean(ranks < edge) for edge in edges])
    assert np.abs(measured - share(rows, edges.astype(np.float64))).max() < 0.006  # Kolmogorov-Smirnov, 1 in 700


@cases(100)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_scatter_is_a_bijection(rows: int, key: int) -> None:
    assert np.array_equal(np.sort(rows_by_rank(rows, key)), np.arange(rows))


def test_scatter_keeps_large_tables_apart_and_inside() -> None:
    rows = 10_131_227
    hot = rows_by_rank(rows, key=11, ranks=20_000)
    assert len(np.unique(hot)) == 20_000
    assert hot.min() >= 0 and hot.max() < rows
    assert np.mean(rows_by_rank(rows, key=12, ranks=20_000) == hot) < 0.001
