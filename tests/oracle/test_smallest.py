"""The smallest elements by two keys are those that a full sort gives."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skirl.oracle.policies.compared import smallest


@given(first=st.lists(st.integers(-3, 3), max_size=40), count=st.integers(0, 45), seed=st.integers(0, 99))
def test_as_a_sort_by_both_keys(first, count, seed):
    values = np.array(first, np.int64)
    second = np.random.default_rng(seed).permutation(len(values))
    assert smallest(count, values, second).tolist() == np.lexsort((second, values))[:count].tolist()
