"""Variants of a sweep leave behind the bits of their lone runs, whatever the others are; and what is refused."""

import pytest

from skirl import SGD, Adagrad, Adam, RowwiseAdagrad
from tests.sweep.runs import Case, Of, check

MIXED = (
    Of(),
    Of(lr=0.5, rule=Adam(), seed=3),
    Of(dim=6, rule=Adagrad(), width=8, dropout=0.5),
    Of(rule={"a": RowwiseAdagrad(), "*": SGD(momentum=0.9)}, dropout=0.3, only=("x", "b"), dropped=5),
    Of(lr=0.0, norm=True, seed=1),
    Of(nan=3),
)


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_loop_of_ones_own(own_loop):
    check(Case(MIXED, own_loop=own_loop))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_lanes(kind, tmp_path):
    sweep = check(Case(MIXED, form="lanes", steps=14, nap=0.003, kind=kind, folder=tmp_path, slots=48))
    assert [v.draws for v in sweep.variants] == [False, False, True, True, False, False]
