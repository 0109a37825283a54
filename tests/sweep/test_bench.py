"""The parts of `skirl bench sweep` that count and compare, on problems that take a second."""

from typing import Any

import numpy as np
import pytest

from skirl.sweep import bench_exact
from skirl.sweep.bench_exact import exact
from skirl.sweep.bench_once import once
from skirl.sweep.bench_race import Truth
from skirl.train.recipe import Recipe

TINY: dict[str, Any] = {
    "data": "synthetic:tiny",
    "model": "dlrm-tiny",
    "dim": 4,
    "batch": 16,
    "cache": "200",
    "threads": 1,
}


def test_what_is_read_hashed_and_planned_is_that_of_one():
    found = once(Recipe.of(**TINY), (1, 8), 4)
    assert found["once"]
    for one in found["by_variants"]:
        assert (one["read_batches"], one["plans"], one["read_ids"], one["hashed_ids"]) == (4, 4, 4 * 16 * 6, 4 * 16 * 6)
        assert one["variant_steps"] == 4 * one["variants"]


def test_all_models_beside_each_other_have_the_bits_of_lone_runs(monkeypatch: pytest.MonkeyPatch):
    """With rows pooled and not. The full check is `skirl bench sweep --part exact`."""
    monkeypatch.setattr("skirl.sweep.verify.FORMS", ("lanes",))
    monkeypatch.setattr("skirl.sweep.verify.DEPTHS", (1,))
    monkeypatch.setattr("skirl.sweep.verify.STORES", ("memory",))
    monkeypatch.setattr(bench_exact, "SETS", {name: bench_exact.SETS[name] for name in ("one id", "unpooled sessions")})
    found = exact(Recipe.of(**TINY | {"batch": 4, "cache": "100%"}), 6, dims=(4,))
    assert found["differences"] == 0 and found["bits_equal"]
    assert [len(one["variants"]) for one in found["sets"].values()] == [7, 2]
    assert sum(one["fetched"] for one in found["sets"].values()) > 0


def test_pruners_of_optuna_beside_ours():
    pytest.importorskip("optuna", reason="not installed: pip install 'skirl[sweep]'")
    from skirl.sweep.bench_pruners import pruned

    random = np.random.default_rng(1)
    losses = 0.5 + 0.02 * np.arange(8)[:, None] + random.normal(0, 0.1, (1, 200)) + random.normal(0, 0.01, (8, 200))
    found = pruned(Truth([f"v{n}" for n in range(8)], losses, 1.0))
    assert set(found) == {f"{name}{way}" for name in ("median", "halving", "hyperband") for way in ("", "_at_once")}
    assert all(0 < one["cost"] <= 1 and one["regret"] < 0.05 for one in found.values())
    assert found["median_at_once"]["cost"] == 1.0  # it compares only with finished trials
    assert found["halving"]["cost"] < 0.7
