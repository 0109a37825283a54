"""Costs are measured on the engine's kernels: they compute the right results, costs are fitted, and plans are compared."""

from dataclasses import replace

import numpy as np
import pytest

from skirl.core.optim import row_optimizer
from skirl.placement import calibrate
from skirl.placement.calibrate import Measured, fit, fit_costs, measure_machine, training
from skirl.placement.costs import TERMS, load_costs, shipped
from skirl.placement.measure import Arena, Lookups, Ready, check_plans, exchange_of
from skirl.placement.problem import Problem
from skirl.placement.search import SearchResult
from skirl.placement.spec import Piece, TableSpec
from skirl.tools.machine import machine


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(1 << 20)


@pytest.fixture
def small(monkeypatch):
    """Few and small tables, and nets that are trained briefly."""
    for name, value in (("DIMS", (4, 8)), ("BATCHES", (16,)), ("OTHER_BATCHES", (24,)), ("TABLES", 4), ("ROUNDS", 2)):
        monkeypatch.setattr(calibrate, name, value)
    for name in ("EPOCHS", "TUNED"):
        monkeypatch.setattr(f"skirl.placement.costs.{name}", 3)
    monkeypatch.setattr(calibrate, "COMBINATIONS", 16)
    monkeypatch.setattr(calibrate, "arena_of", lambda kernel: Arena(1 << 14))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad"])
def test_what_is_timed_is_a_step(arena, optimizer):
    spec = TableSpec("a", 3000, 8, 32, 400.0, 300.0, optimizer=optimizer)
    lookups = Lookups(spec, 0)
    part = Ready(arena, lookups, Piece(0, 1000, 2500, 0, 8))
    ids, bags = lookups.of(Piece(0, 1000, 2500, 0, 8))
    assert len(ids) and ids.min() >= 0 and ids.max() < 1500
    part.cache[:] = np.random.default_rng(0).random(part.cache.shape)
    part.gradients.grads[:] = 1.0
    before = part.cache.copy()
    part.forward()
    wanted = np.zeros((32, 8))
    np.add.at(wanted, bags, before[ids, :8])  # this piece begins where the arena begins
    assert np.allclose(part.out, wanted, rtol=1e-4)
    part.backward()
    changed = np.flatnonzero((part.cache != before).any(axis=1))
    assert set(changed) <= set(ids) and len(changed) > 0.9 * len(set(ids))
    assert part.cache.shape[1] == row_optimizer(optimizer)().width(8)


def test_a_fit_finds_what_times_were_made_of():
    rng = np.random.default_rng(0)
    terms = rng.random((40, len(TERMS)))
    ms = np.array([0.1, 0, 2, 0, 0.5, 1, 0, 0, 3, 0.2])
    assert np.allclose(fit(terms, terms @ ms), ms, atol=1e-6)
    longer = np.where(np.arange(40) % 5 == 2, 1.5, 1.0)  # disturbed: least squares would be off by a tenth
    assert np.median(np.abs(terms @ fit(terms, terms @ ms * longer) / (terms @ ms) - 1)) < 0.01
    assert min(fit(terms, terms @ np.array([1, -0.3, 2, 0, 0.5, 1, 0, 0, 0, 0]))) >= 0


def test_a_net_is_kept_only_if_it_is_better_by_more_than_chance(small, monkeypatch):
    few, judges = (training("sgd", 40, seed, (16,)) for seed in (0, 9))
    true = replace(shipped(1e9, 1), net=None)
    sums, others = (true.together([c.parts for c in of]) for of in (few, judges))
    assert fit_costs(Measured(few, sums), Measured(judges, others), 0).net is None
    start = shipped(1.0, 1)
    assert start.net is not None
    monkeypatch.setattr(calibrate, "DIMS", (4, 28, 128))
    monkeypatch.setattr(calibrate, "TABLES", 60)
    monkeypatch.setattr("skirl.placement.costs.TUNED", 60)
    few, judges = (training("sgd", 40, seed, (512,)) for seed in (0, 9))
    bent = start.together([c.parts for c in few]), start.together([c.parts for c in judges])
    found = fit_costs(Measured(few, bent[0]), Measured(judges, bent[1]), 0, start)
    assert found.net is not None


def test_costs_are_measured_and_written(small, tmp_path):
    out = tmp_path / "c.json"
    made = measure_machine("skirl-cpu", ["sgd"], minutes=1e-9, out=out)
    costs = load_costs(out, link=1e9, ranks=2)
    assert costs.ms == made.ms and set(costs.ms) == {"sgd"} and sum(costs.ms["sgd"]) > 0
    assert costs.machine is not None and costs.machine["processor"] == machine()["processor"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


SPECS = [TableSpec(f"t{n}", 400 * n + 60, 16, 32, 32.0 * n + 32, 9.0 * n + 9, optimizer="sgd") for n in range(4)]


class Fake(Arena):
    """A machine on which a rank takes what its tables say."""

    def __init__(self) -> None:
        super().__init__(1 << 10)
        self.turns = 0

    def ready(self, lookups, piece):
        return {"t0": 1.0, "t1": 1.0, "t2": 5.0, "t3": 5.0}[lookups.spec.name]

    def run_ms(self, parts) -> float:
        self.turns += 1
        return sum(parts)


def three_plans() -> tuple[Problem, SearchResult]:
    problem = Problem(SPECS, (1 << 40,) * 3, replace(shipped(1e9, 3), net=None))
    plans = [
        problem.at(problem.root(), np.array(at)) for at in ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 2, 0])
    ]
    return problem, SearchResult(plans[0], others=plans[1:])


def test_the_best_of_three_measured_plans_is_used():
    problem, found = three_plans()
    arena = Fake()
    checked = check_plans(problem, found, arena)
    ms = [[2, 10, 0], [6, 6, 0], [12, 0, 0]]
    wanted = [max(of + exchange_of(problem, plan)) for of, plan in zip(ms, [found.placed, *found.others])]
    assert checked.busiest == pytest.approx(wanted) and checked.chosen == 1 and checked.noise == 0
    assert checked.placed is found.others[0] and checked.compute.tolist() == [6, 6, 0]
    assert arena.turns == 5 * 9  # once to begin with, then in four rounds


def test_what_is_within_the_noise_changes_nothing(monkeypatch):
    monkeypatch.setattr("skirl.placement.measure.noise_of", lambda rounds: 0.9)
    problem, found = three_plans()
    checked = check_plans(problem, found, Fake())
    assert checked.chosen == 0 and checked.placed is found.placed


def test_plans_are_measured_on_the_kernels(arena):
    problem, found = three_plans()
    checked = check_plans(problem, found, arena)
    assert (checked.compute >= 0).all() and checked.compute.max() > 0 and min(checked.busiest) > 0
