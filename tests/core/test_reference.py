"""The reference itself, checked by hand and against plain PyTorch."""

import numpy as np

from skirl.core.initial import Constant, Uniform
from skirl.core.optim import SGD, Adagrad, Adam
from skirl.core.reference import Reference, tree_sum
from skirl.core.tables import Table


def ones(*shape):
    return np.ones(shape, np.float32)


def test_tree_sum_folds_by_halves():
    big = np.float32(2**24)
    # (big + -big) + (1 + 1), where summing from the left would lose the first 1: big + 1 = big.
    assert tree_sum(np.array([big, 1, -big, 1], np.float32)) == 2
    # Five values: the fifth is added to the first, then halves of two and one.
    assert tree_sum(np.array([big, 1, 0, 1, -big], np.float32)) == 2
    assert tree_sum(np.array([3], np.float32)) == 3


def test_pooling_by_hand():
    tables = [Table("s", 10, 1, init=Constant(1.0)), Table("m", 10, 1, init=Constant(1.0), pooling="mean")]
    bags = ([1, 2, 2, 5], [0, 3, 3, 4], [1.0, 2.0, 3.0, 4.0])
    out = Reference(tables, SGD()).forward({"s": bags, "m": bags})
    assert out["s"].ravel().tolist() == [6, 0, 4]
    assert out["m"].ravel().tolist() == [2, 0, 4]


def test_evaluation_changes_nothing():
    reference = Reference([Table("t", 10, 2)], SGD(lr=1.0))
    reference.forward({"t": ([1], [0, 1], None)})
    reference.forward({"t": ([2], [0, 1], None)}, evaluate=True)
    assert list(reference.rows) == [1]
    reference.backward({"t": ones(1, 2)})  # for the first forward


def test_a_feature_without_gradient_is_not_updated():
    table = Table("t", 10, 1, features=("a", "b"), init=Constant(0.0))
    reference = Reference([table], Adam())
    bags = {"a": ([1, 2], [0, 2], None), "b": ([2, 3], [0, 2], None)}
    reference.forward(bags)
    reference.backward({"a": ones(1, 1), "b": None})
    assert reference.rows[1][0] != 0 and reference.rows[2][0] != 0 and reference.rows[3][0] == 0
    assert reference.table_steps == [1]
    reference.forward(bags)
    reference.backward({})
    assert reference.table_steps == [1]


def test_micro_batches_are_one_step():
    table = Table("t", 10, 2, init=Uniform(1.0))
    whole, parts = (Reference([table], Adagrad(lr=0.1), seed=3) for _ in range(2))
    grads = np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)
    whole.forward({"t": ([1, 2, 1], [0, 2, 3], None)})
    whole.backward({"t": grads})
    parts.forward({"t": ([1, 2], [0, 2], None)})
    parts.forward({"t": ([1], [0, 1], None)}, accumulate=True)
    parts.backward({"t": grads[:1]}, {"t": grads[1:]})
    for key in (1, 2):
        np.testing.assert_array_equal(whole.rows[key], parts.rows[key])


def test_a_feature_counts_in_the_micro_batches_that_gave_it_a_gradient():
    """Adam moves a row with momentum even for a zero gradient: since row 2 stays, its positions do not count."""
    table = Table("t", 10, 1, features=("a", "b"), init=Constant(0.0))
    reference = Reference([table], Adam())
    reference.forward({"a": ([1, 2, 3], [0, 3], None)})
    reference.backward({"a": ones(1, 1)})
    before = {key: row.copy() for key, row in reference.rows.items()}
    reference.forward({"a": ([1], [0, 1], None), "b": ([2], [0, 1], None)})
    reference.forward({"a": ([2], [0, 1], None), "b": ([3], [0, 1], None)}, accumulate=True)
    reference.backward({"a": ones(1, 1), "b": None}, {"b": ones(1, 1)})
    assert [key for key in before if (reference.rows[key] != before[key]).any()] == [1, 3]
    assert reference.table_steps == [2]
