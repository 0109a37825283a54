"""Nets that predict costs: what they compute, learn and refuse; a search that uses one; and the file of costs."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from skirl.placement.costs import (
    BINS,
    FEATURES,
    HEAD,
    HIDDEN,
    SUMS,
    TERMS,
    ComputeNet,
    Costs,
    Mlp,
    Sets,
    features_of,
    load_costs,
    save_costs,
    shipped,
    train_net,
)
from skirl.placement.problem import Problem
from skirl.placement.search import plan_tables
from skirl.placement.spec import TableSpec, canonical

MS = (0.01, *(1e-6 for _ in TERMS[1:]))


def net(seed: int = 0, size: float = 0.3) -> ComputeNet:
    rng = np.random.default_rng(seed)

    def drawn(inputs: int, units: int, outputs: int) -> Mlp:
        shapes = ((units, inputs), (units,), (outputs, units), (outputs,))
        return Mlp(*(rng.normal(0, size, shape) for shape in shapes))

    mean, deviation = rng.random(len(FEATURES)), rng.random(len(FEATURES)) + 0.5
    return ComputeNet(mean, deviation, drawn(len(FEATURES), HIDDEN, 1 + SUMS), drawn(SUMS, HEAD, 1))


def costs(ranks: int, seed: int = 0) -> Costs:
    return Costs(dict.fromkeys(("sgd", "adagrad"), MS), 1e8, ranks, net=net(seed), machine={"why": "drawn"})


def spec(n: int, rows: int = 3000, dim: int = 16, pooling: float = 6.0, **more) -> TableSpec:
    reuse = tuple(np.random.default_rng(n).dirichlet(np.ones(BINS)).tolist())
    return TableSpec(f"t{n}", rows, dim, 32, 32 * pooling, 20 * pooling, reuse, "sgd", **more)


def test_a_search_goes_by_what_ranks_have_together():
    specs = [spec(n, 500 * n + 400, (4, 16, 24)[n % 3], 2.0 + n) for n in range(5)]
    caps, made = (1 << 30,) * 2, costs(2, seed=3)
    plan, found, problem = plan_tables(specs, caps, made, seconds=5)
    for rank in range(2):
        parts = [(specs[n], p.rows, p.dim) for n, of in enumerate(plan.pieces) for p, at in of if at == rank]
        exchange = sum(2e3 * s.batch * dim * 4 / 2 / 1e8 for s, _, dim in parts)
        assert found.placed.load[rank] == pytest.approx(made.together([parts])[0] + exchange)
    whole = Problem([specs[n] for n in canonical(specs)], caps, made)
    best = min(whole.at(whole.root(), np.array(at)).score for at in itertools.product(range(2), repeat=5))
    assert found.placed.score[1] <= best[1] * 1.001


def known(sets: int, seed: int) -> Sets:
    """Return sets whose time is the sum of their parts times a known function of their number and dims."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 8, sets)
    of = np.repeat(np.arange(sets), sizes)
    dims = rng.choice([4, 16, 64], len(of)).tolist()
    features = np.array([features_of(spec(n % 9, dim=16), 3000, dim) for n, dim in enumerate(dims)])
    base = rng.random(len(of)) + 0.5
    ms = np.bincount(of, base * (1 + 0.4 * (np.array(dims) == 4))) * (1 + 0.08 * sizes)
    return Sets(features, base, of, ms)


def test_a_net_learns_what_a_sum_cannot_say(monkeypatch):
    for name, value in (("EPOCHS", 60), ("RATE", 1e-2), ("DROPPED", 0.0), ("TUNED", 5)):
        monkeypatch.setattr(f"skirl.placement.costs.{name}", value)
    learned, other = known(120, 0), known(60, 1)
    made = train_net(learned, 0)

    def off(net: ComputeNet | None) -> float:
        ms = np.bincount(other.of, other.base)
        if net is not None:
            factors, adds = net.parts(other.features)
            sums = np.stack([np.bincount(other.of, column) for column in adds.T], axis=1)
            ms = np.bincount(other.of, other.base * factors) * net.factors(sums)
        return float(np.median(np.abs(ms / other.ms - 1)))

    assert off(made) < 0.03 < 0.15 < off(None)
    assert off(train_net(known(40, 2), 0, made)) < 0.04  # training continues rather than starting over


def test_costs_come_back(tmp_path):
    made = replace(costs(2), machine={"processor": "Z80", "device": "cpu"})
    save_costs(made, tmp_path / "c.json")
    found = load_costs(tmp_path / "c.json", link=1e8, ranks=2)
    sets = [[(spec(1), 500, 12), (spec(2), 3000, 64)]]
    assert found.together(sets) == pytest.approx(made.together(sets), rel=1e-5)
    assert replace(found, net=None) == replace(made, net=None)
    assert shipped(1.0, 2).net is not None and {"sgd", "adagrad", "rowwise-adagrad"} <= shipped(1.0, 2).ms.keys()


def test_costs_of_another_skirl_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    for name, value, says in (
        ("TERMS", ("ids",), "has other terms than those of this skirl: measure again"),
        ("VERSION", 2, "in format 2, skirl .* reads format 4"),
    ):
        with monkeypatch.context() as other:
            other.setattr(f"skirl.placement.costs.{name}", value)
            save_costs(costs(2), path)
        with pytest.raises(ValueError, match=says):
            load_costs(path, link=1e8, ranks=2)
    with monkeypatch.context() as other:
        other.setattr("skirl.placement.costs.FEATURES", ("dim",))
        save_costs(costs(2), path)
    with pytest.raises(ValueError, match="its net has other features"):
        load_costs(path, link=1e8, ranks=2)


def test_costs_of_one_kernel_are_not_taken_for_anothers(tmp_path):
    path = tmp_path / "c.json"
    save_costs(replace(costs(2), kernel="fbgemm-cpu"), path)
    assert load_costs(path, link=1.0, ranks=2, kernels=("fbgemm-cpu",)).kernel == "fbgemm-cpu"
    with pytest.raises(ValueError, match="is for kernel 'fbgemm-cpu', not for 'skirl-cpu': measure costs for"):
        load_costs(path, link=1.0, ranks=2)
