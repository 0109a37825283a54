"""Paired losses: sums, errors and the bound, each compared with a few plain lines; and how often the best is dropped."""

import math
import statistics

import numpy as np
import pytest

from skirl.sweep.paired import Course, PairSums, added, bound, errors, no_sums, share_of_alpha, surely_behind, together
from skirl.sweep.simulated import simulate


def sums_of(losses: np.ndarray):
    sums = no_sums(losses.shape[1])
    for row in losses:
        sums = added(sums, row)
    return sums


def made() -> np.ndarray:
    return np.random.default_rng(3).normal(0.5, 0.1, (40, 4)) + np.random.default_rng(4).normal(0, 1, (40, 1))


@pytest.fixture(scope="module")
def losses() -> np.ndarray:
    return made()


def test_sums_and_errors_are_those_of_the_differences_written_out(losses: np.ndarray):
    sums = sums_of(losses)
    assert sums.batches == 40
    for i in range(4):
        assert sums.losses[i] == pytest.approx(math.fsum(losses[:, i]))
        for j in range(4):
            differences = [float(a - b) for a, b in zip(losses[:, i], losses[:, j], strict=True)]
            assert sums.differences[i, j] == pytest.approx(math.fsum(differences), abs=1e-9)
            assert sums.squares[i, j] == pytest.approx(math.fsum(d * d for d in differences))
            expected = statistics.stdev(differences) / math.sqrt(40)
            assert errors(sums)[i, j] == pytest.approx(expected, abs=1e-9)


def test_one_that_was_not_there_changes_no_sum_of_its_pairs(losses: np.ndarray):
    gone = losses.copy()
    gone[20:, 1] = np.nan
    all_of, part = sums_of(gone), sums_of(losses[:20])
    assert all_of.losses[1] == part.losses[1]
    assert (all_of.differences[1] == part.differences[1]).all()
    assert (all_of.squares[:, 1] == part.squares[:, 1]).all()
    assert all_of.differences[0, 2] == sums_of(losses).differences[0, 2]


def test_sums_of_two_stretches_are_those_of_both(losses: np.ndarray):
    both, whole = together(sums_of(losses[:13]), sums_of(losses[13:])), sums_of(losses)
    assert both.batches == whole.batches
    assert both.squares == pytest.approx(whole.squares)
    assert both.losses == pytest.approx(whole.losses)


def mixture(total: float, squares: float, r: float) -> float:
    """Return the mean of exp(h d - h^2 d^2 / 2) over h, half-normal with variance r, summed on a fine grid."""
    h = np.linspace(0, 12 * math.sqrt(r), 400_001)
    density = np.sqrt(2 / (math.pi * r)) * np.exp(-(h**2) / (2 * r))
    return float(np.trapezoid(density * np.exp(h * total - h**2 * squares / 2), h))


@pytest.mark.parametrize("alpha", [0.5, 0.05, 1e-4])
@pytest.mark.parametrize("squares", [0.1, 1.0, 30.0])
def test_the_bound_is_where_the_mixture_reaches_one_over_alpha(alpha: float, squares: float):
    before = 2.0
    r = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / before
    at = float(bound(np.array(squares), np.array(before), alpha))
    assert mixture(at, squares, r) >= 1 / alpha
    assert mixture(at * 0.75, squares, r) < 1 / alpha


def test_products_of_such_differences_are_no_more_than_1_on_average():
    """The basis of the proof, for differences that are symmetric around a mean of 0 or less."""
    for half in (0.01, 0.3, 1.0, 5.0):
        for mean in (0.0, -0.1, -1.0, -10.0):
            for h in np.linspace(0, 4, 81):
                d = np.array([mean + half, mean - half])
                assert np.mean(np.exp(h * d - (h * d) ** 2 / 2)) <= 1 + 1e-12


def test_nothing_is_sure_where_nothing_is_known_of_the_size_of_differences():
    assert bound(np.array(1.0), np.array(0.0), 0.05) == np.inf


def test_shares_of_alpha_are_together_no_more_than_1():
    assert sum(share_of_alpha(n) for n in range(1, 10_000)) < 1


def test_behind_are_those_whose_sum_exceeds_the_bound_against_one_that_races(losses: np.ndarray):
    losses = losses + np.array([0.0, 0.03, 0.2, 0.5])
    now, before = sums_of(losses[20:]), sums_of(losses[:20])
    for racing in ([True] * 4, [False, True, True, True], [False, False, True, True]):
        expected = []
        for i in range(4):
            out = False
            for j in range(4):
                least = float(bound(now.squares[i, j], before.squares[i, j], 0.05 / 3))
                out |= racing[i] and racing[j] and now.differences[i, j] > least
            expected.append(out)
        assert surely_behind(now, before, np.array(racing), 0.05).tolist() == expected
        assert any(expected)


def test_each_of_the_others_has_its_part_of_alpha():
    pairs = np.ones((4, 4))
    least = float(bound(np.array(1.0), np.array(1.0), 0.05 / 3))
    for total, behind in ((0.999 * least, False), (1.001 * least, True)):
        differences = np.zeros((4, 4))
        differences[2, 0] = total
        now, before = PairSums(9, np.zeros(4), differences, pairs), PairSums(9, np.zeros(4), pairs, pairs)
        assert surely_behind(now, before, np.ones(4, bool), 0.05).tolist() == [False, False, behind, False]


def test_stretches_double_and_each_begins_anew(losses: np.ndarray):
    course, lengths = Course.begin(4, 4), [0]
    for n, row in enumerate(losses):
        stretch = course.stretch
        course = course.after(row)
        lengths += [0] if course.stretch > stretch else []
        lengths[-1] += 1
        begun = n + 1 - lengths[-1]
        assert course.now.squares == pytest.approx(sums_of(losses[begun : n + 1]).squares)
        assert course.recent().batches >= (n + 1) / 2
        if not course.stretch:
            assert not course.out(np.ones(4, bool), 0.05).any()
    assert lengths == [4, 8, 16, 12]


KINDS = ("normal", "heavy", "skewed", "drifting")


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_dropped_no_oftener_than_alpha(kind: str):
    """Uses a rate of 0.5, because it takes few races to test it."""
    found = simulate(300, 3, 60, alpha=0.5, kind=kind, seed=5)
    assert found.wrong <= 0.5
    assert simulate(100, 3, 60, alpha=0.5, gap=1.0, kind=kind, seed=6).left > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("gap", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_is_dropped_no_oftener_than_alpha_in_many_races(kind: str, gap: float):
    for seed in range(10):
        assert simulate(1000, 6, 500, alpha=0.05, gap=gap, kind=kind, seed=seed).wrong <= 0.05


FOR_FAULTS = (
    lambda: test_sums_and_errors_are_those_of_the_differences_written_out(made()),
    lambda: test_one_that_was_not_there_changes_no_sum_of_its_pairs(made()),
    lambda: test_the_bound_is_where_the_mixture_reaches_one_over_alpha(0.05, 30.0),
    test_shares_of_alpha_are_together_no_more_than_1,
    lambda: test_behind_are_those_whose_sum_exceeds_the_bound_against_one_that_races(made()),
    test_each_of_the_others_has_its_part_of_alpha,
    lambda: test_stretches_double_and_each_begins_anew(made()),
)
"""Tests that must catch the planted faults."""
