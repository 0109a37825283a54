"""The benchmark of a race, on losses for which the answer is known."""

from pathlib import Path

import numpy as np
import pytest

from skirl.sweep.bench_race import Truth, grid, kept, paired_gain, replayed, rules_of, seed_noise
from skirl.sweep.rules import Rules
from skirl.train.recipe import Recipe


@pytest.fixture(scope="module")
def truth() -> Truth:
    random = np.random.default_rng(1)
    recipe = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4)
    names = [variant.name for variant in grid(recipe, 16)]
    means = 0.5 + 0.002 * np.arange(len(names))[:, None]
    losses = means + random.normal(0, 0.1, (1, 400)) + random.normal(0, 0.01, (len(names), 400))
    return Truth(names, losses, 1.0)


def test_a_grid_has_so_many_configurations_and_a_second_seed_of_four():
    recipe = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4)
    for count in (16, 32):
        variants = grid(recipe, count)
        assert [v.overrides["seed"] for v in variants] == [0] * count + [1] * 4
        assert {v.name for v in grid(recipe, 16)[:16]} <= {v.name for v in variants}


def test_cost_counts_the_steps_of_all_that_raced(truth: Truth):
    sixteen = truth.of(truth.names[:16])
    found = replayed(sixteen, Rules(alpha=0, rungs=(40, 200)))
    assert found["cost"] == pytest.approx((16 * 40 + 8 * 160 + 4 * 200) / (16 * 400))
    assert (found["winner"], found["regret"]) == (truth.names[0], 0.0)
    with_rungs = replayed(sixteen, rules_of(16, 400, 0.05))
    assert with_rungs["cost"] <= 0.2
    assert with_rungs["regret"] < 0.01


def test_noise_and_gain_are_those_that_the_losses_were_made_with(truth: Truth):
    assert paired_gain(truth) == pytest.approx((0.1**2 + 0.01**2) / 0.01**2, rel=0.2)
    apart = [0.002 * (16 + n - at) for n, at in enumerate((1, 5, 9, 13))]  # configurations whose seeds are 16 to 19
    assert seed_noise(truth) == pytest.approx(np.mean(apart) / truth.final.min(), rel=0.1)


def test_losses_of_other_variants_are_refused(truth: Truth, tmp_path: Path):
    recipe = Recipe.of(data="synthetic:tiny", model="dlrm-tiny", dim=4)
    np.savez(tmp_path / "a.npz", names=np.array(truth.names), losses=truth.losses, seconds=1.0)
    assert kept(tmp_path / "a.npz", recipe, grid(recipe, 16)).losses.shape == (20, 400)
    with pytest.raises(ValueError, match="which holds other variants"):
        kept(tmp_path / "a.npz", recipe, grid(recipe, 32))
