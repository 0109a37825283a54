"""Costs are measured on the engine's kernels, fitted, and predicted by nets; plans are compared by them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from skirl.core.optim import row_optimizer
from skirl.placement import measure
from skirl.placement.costs import (
    BINS,
    FEATURES,
    HEAD,
    HIDDEN,
    SUMS,
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
from skirl.placement.measure import (
    Arena,
    Lookups,
    Measured,
    Ready,
    check_plans,
    exchange_of,
    fit,
    fit_costs,
    measure_machine,
    training,
)
from skirl.placement.search import Problem, SearchResult, plan_tables
from skirl.placement.spec import Piece, TableSpec, canonical, pieces_of

MS = (0.01, *(1e-6 for _ in range(9)))


def net(seed: int = 0, size: float = 0.3) -> ComputeNet:
    rng = np.random.default_rng(seed)

    def drawn(inputs: int, units: int, outputs: int) -> Mlp:
        shapes = ((units, inputs), (units,), (outputs, units), (outputs,))
        return Mlp(*(rng.normal(0, size, shape) for shape in shapes))

    mean, deviation = rng.random(FEATURES), rng.random(FEATURES) + 0.5
    return ComputeNet(mean, deviation, drawn(FEATURES, HIDDEN, 1 + SUMS), drawn(SUMS, HEAD, 1))


def costs(ranks: int, seed: int = 0) -> Costs:
    return Costs(dict.fromkeys(("sgd", "adagrad"), MS), 1e8, ranks, net=net(seed))


def spec(n: int, rows: int = 3000, dim: int = 16, pooling: float = 6.0, **more) -> TableSpec:
    reuse = tuple(np.random.default_rng(n).dirichlet(np.ones(BINS)).tolist())
    return TableSpec(f"t{n}", rows, dim, 32, 32 * pooling, 20 * pooling, reuse, "sgd", **more)


def test_a_search_goes_by_what_ranks_have_together():
    specs = [spec(n, 500 * n + 400, (4, 16, 24)[n % 3], 2.0 + n) for n in range(5)]
    caps, made = (1 << 30,) * 2, costs(2, seed=3)
    plan, found, problem = plan_tables(specs, caps, made, seconds=5)
    for rank in range(2):
        pieces = [(s, of) for n, s in enumerate(specs) for of in pieces_of(n, plan.tables[n], 2)]
        parts = [(s, p.rows, p.dim) for s, (p, at) in pieces if at == rank and p.rows]
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
    made = costs(2)
    save_costs(made, tmp_path / "c.json")
    found = load_costs(tmp_path / "c.json", link=1e8, ranks=2)
    sets = [[(spec(1), 500, 12), (spec(2), 3000, 64)]]
    assert found.together(sets) == pytest.approx(made.together(sets), rel=1e-5)
    assert replace(found, net=None) == replace(made, net=None)
    assert shipped(1.0, 2).net is not None and {"sgd", "adagrad", "rowwise-adagrad"} <= shipped(1.0, 2).ms.keys()


def test_costs_of_another_skirl_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "c.json"
    with monkeypatch.context() as other:
        other.setattr("skirl.placement.costs.VERSION", 2)
        save_costs(costs(2), path)
    with pytest.raises(ValueError, match=r"in format 2, skirl .* reads format 5"):
        load_costs(path, link=1e8, ranks=2)


def test_costs_of_one_kernel_are_not_taken_for_anothers(tmp_path):
    path = tmp_path / "c.json"
    save_costs(replace(costs(2), kernel="fbgemm-cpu"), path)
    assert load_costs(path, link=1.0, ranks=2, kernels=("fbgemm-cpu",)).kernel == "fbgemm-cpu"
    with pytest.raises(ValueError, match="is for kernel 'fbgemm-cpu', not for 'skirl-cpu': measure costs for"):
        load_costs(path, link=1.0, ranks=2)


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(1 << 20)


@pytest.fixture
def small(monkeypatch):
    """Few and small tables, and nets that are trained briefly."""
    for name, value in (("DIMS", (4, 8)), ("BATCHES", (16,)), ("OTHER_BATCHES", (24,)), ("TABLES", 4), ("ROUNDS", 2)):
        monkeypatch.setattr(measure, name, value)
    for name in ("EPOCHS", "TUNED"):
        monkeypatch.setattr(f"skirl.placement.costs.{name}", 3)
    monkeypatch.setattr(measure, "COMBINATIONS", 16)
    monkeypatch.setattr(measure, "arena_of", lambda kernel: Arena(1 << 14))


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
    terms = rng.random((40, 10))
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
    monkeypatch.setattr(measure, "DIMS", (4, 28, 128))
    monkeypatch.setattr(measure, "TABLES", 60)
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
    placed, computing, busiest = check_plans(problem, found, arena)
    ms = [[2, 10, 0], [6, 6, 0], [12, 0, 0]]
    wanted = [max(of + exchange_of(problem, plan)) for of, plan in zip(ms, [found.placed, *found.others])]
    assert busiest == pytest.approx(wanted)
    assert placed is found.others[0] and computing.tolist() == [6, 6, 0]
    assert arena.turns == 9 * 9  # once to begin with, then in eight rounds


def test_plans_are_measured_on_the_kernels(arena):
    problem, found = three_plans()
    _, computing, busiest = check_plans(problem, found, arena)
    assert (computing >= 0).all() and computing.max() > 0 and min(busiest) > 0
