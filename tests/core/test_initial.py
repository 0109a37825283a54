"""Initial values: their distribution, their bits, and that every device can compute them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.core import reference
from skirl.core.initial import Constant, Normal, Uniform, first_rows
from tests.cases import cases

keys = st.builds(lambda table, row: table << 48 | row, st.integers(0, 3), st.integers(0, 2**48 - 1))
above = st.floats(0, 10)
initials = st.builds(Uniform, above) | st.builds(Normal, above) | st.builds(Constant, st.floats(-10, 10))
dtypes = st.sampled_from([np.float32, np.float64])
GOLDEN_UNIFORM = [
    "0x1.a568500000000p-2", "0x1.3f3d300000000p-1", "-0x1.02da400000000p-3", "0x1.7326800000000p-3",
    "0x1.f1d9880000000p-1", "-0x1.72d1c00000000p-5",
]  # fmt: skip
GOLDEN_NORMAL = [
    "0x1.1507ea0000000p-1", "0x1.c4d0220000000p-1", "-0x1.45c8020000000p-3", "0x1.d53fc20000000p-3",
    "0x1.19e9d20000000p+1", "-0x1.d112940000000p-5",
]  # fmt: skip


def test_golden_bits():
    got = [value.hex() for value in first_rows([0, 1 << 48 | 5], Uniform(1.0), dim=3, seed=7).ravel().tolist()]
    assert got == GOLDEN_UNIFORM
    got = [value.hex() for value in first_rows([0, 1 << 48 | 5], Normal(1.0), dim=3, seed=7).ravel().tolist()]
    assert got == GOLDEN_NORMAL


@cases(100)
@given(st.lists(keys, min_size=1, max_size=5), initials, st.integers(1, 9), st.integers(0, 2**63 - 1), dtypes)
def test_kernel_equals_reference(key_list, initial, dim, seed, dtype):
    got = first_rows(key_list, initial, dim, seed, dtype)
    expected = reference.initial_values(initial, key_list, dim, seed, dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_distribution():
    rows = np.arange(20_000)
    uniform = first_rows(rows, Uniform(2.0), dim=16, seed=1)
    assert uniform.min() >= -2 and uniform.max() < 2
    counts, _ = np.histogram(uniform, bins=64, range=(-2, 2))
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 120  # chi-square, 63 degrees: 1 in 100,000
    normal = first_rows(rows, Normal(0.5), dim=16, seed=1).astype(np.float64)
    assert abs(normal.mean()) < 0.005 and abs(normal.std() - 0.5) < 0.003
    assert abs((normal**4).mean() / 0.5**4 - 3) < 0.1


@pytest.mark.parametrize("initial", [Uniform(1.0), Normal(1.0)])
def test_rows_columns_and_seeds_are_uncorrelated(initial):
    x = first_rows(np.arange(5_000), initial, dim=8, seed=1).astype(np.float64)
    other_seed = first_rows(np.arange(5_000), initial, dim=8, seed=2).astype(np.float64)
    other_table = first_rows(np.arange(5_000) | 1 << 48, initial, dim=8, seed=1).astype(np.float64)
    everything = np.corrcoef(np.hstack([x, np.roll(x, 1, axis=0), other_seed, other_table]).T)
    assert np.abs(everything - np.eye(32)).max() < 0.07  # 5 deviations of 1 / sqrt(5000)
