"""Nets that predict costs: what they compute, learn and refuse; a search that uses one; and exchanges over a wire."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from skirl.cli import main
from skirl.placement.tables import training, wire_fit
from skirl.placement.tables.calibrate import chosen
from skirl.placement.tables.costs import Costs, load_costs, save_costs
from skirl.placement.tables.nets import BINS, FEATURES, HEAD, HIDDEN, SUMS, ComputeNet, Mlp, features_of, packed
from skirl.placement.tables.place import over_caps, planned
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.problem import Problem, Ranks, canonical
from skirl.placement.tables.spec import TableSpec, specs_text
from skirl.placement.tables.terms import TERMS
from skirl.placement.tables.training import Sets, trained
from skirl.placement.tables.wire import UNITS, Wire, WireNets, sent

MS = (0.01, *(1e-6 for _ in TERMS[1:]))


def drawn(rng: np.random.Generator, inputs: int, units: int, outputs: int, size: float = 0.3) -> Mlp:
    shapes = ((units, inputs), (units,), (outputs, units), (outputs,))
    return Mlp(*(rng.normal(0, size, shape) for shape in shapes))


def net(seed: int = 0, size: float = 0.3) -> ComputeNet:
    rng = np.random.default_rng(seed)
    mean, deviation = rng.random(len(FEATURES)), rng.random(len(FEATURES)) + 0.5
    return ComputeNet(
        mean, deviation, drawn(rng, len(FEATURES), HIDDEN, 1 + SUMS, size), drawn(rng, SUMS, HEAD, 1, size)
    )


def costs(ranks: int, seed: int = 0) -> Costs:
    return Costs(dict.fromkeys(("sgd", "adagrad"), MS), 1e8, ranks, net=net(seed), kind="net", report={"why": "drawn"})


def spec(n: int, rows: int = 3000, dim: int = 16, pooling: float = 6.0, **more) -> TableSpec:
    reuse = tuple(np.random.default_rng(n).dirichlet(np.ones(BINS)).tolist())
    return TableSpec(f"t{n}", rows, dim, 32, 32 * pooling, 20 * pooling, reuse, "sgd", **more)


def by_hand(net: ComputeNet, parts: list[tuple[TableSpec, int, int]]) -> float:
    """Return the milliseconds of parts on one rank, in plain Python."""

    def layers(mlp: Mlp, x: list[float]) -> list[float]:
        hidden = [max(0.0, sum(a * b for a, b in zip(w, x)) + c) for w, c in zip(mlp.first, mlp.first_bias)]
        return [sum(a * b for a, b in zip(w, hidden)) + c for w, c in zip(mlp.last, mlp.last_bias)]

    def factor(x: float) -> float:
        return math.exp(math.log(4) * math.tanh(x / math.log(4)))

    total, sums = 0.0, [0.0] * SUMS
    for s, rows, dim in parts:
        share, names = rows / s.rows, ("sgd", "sgd-momentum", "adagrad", "rowwise-adagrad", "adam", "ftrl")
        said = {
            "log rows": math.log(rows), "log dim": math.log(dim), "log batch": math.log(s.batch),
            "log ids": math.log(s.ids * share), "log distinct": math.log(s.distinct * share),
            "log pooling": math.log(s.ids * share / s.batch), "no multiple of 16": float(dim % 16 > 0),
            "no multiple of 8": float(dim % 8 > 0), **{f"is {name}": float(name == s.optimizer) for name in names},
            **{f"reuse {n}": s.reuse[n] if s.reuse else None for n in range(BINS)},
        }  # fmt: skip
        x = []
        for name, mean, deviation in zip(FEATURES, net.mean, net.deviation):
            of = said[name]
            x.append(0.0 if of is None else min(4.0, max(-4.0, (of - mean) / deviation)))
        out = layers(net.each, x)
        total += replace(costs(1), kind="additive").compute(s, rows, dim) * factor(out[0])
        sums = [a + math.log1p(math.exp(b)) for a, b in zip(sums, out[1:])]
    return total * factor(layers(net.head, [math.log1p(a) for a in sums])[0])


def test_what_a_net_says_is_what_it_is_by_hand():
    made = costs(1)
    sets = [[(spec(0), 3000, 16)], [(spec(1), 500, 12), (replace(spec(2), reuse=()), 3000, 64), (spec(3), 7, 4)]]
    assert made.net is not None
    assert made.together(sets) == pytest.approx([by_hand(made.net, of) for of in sets])
    assert made.together([sets[1][:1], sets[1][1:]]).sum() != pytest.approx(made.together(sets)[1], rel=1e-3)
    plain = replace(made, kind="additive")
    assert plain.together(sets[1:])[0] == pytest.approx(sum(plain.compute(*part) for part in sets[1]))


def test_a_search_goes_by_what_ranks_have_together():
    specs = [spec(n, 500 * n + 400, (4, 16, 24)[n % 3], 2.0 + n) for n in range(5)]
    ranks, made = Ranks((1 << 30,) * 2, (1.0, 2.0), (1.0, 0.5)), costs(2, seed=3)
    plan, found, problem = planned(specs, ranks, made, seconds=5)
    assert made.net is not None
    for rank in range(2):
        parts = [(specs[n], p.rows, p.dim) for n, of in enumerate(plan.pieces) for p, at in of if at == rank]
        exchange = sum(2e3 * s.batch * dim * 4 / 2 / 1e8 for s, _, dim in parts)
        said = by_hand(made.net, parts) / ranks.speeds[rank] + exchange / ranks.links[rank]
        assert found.placed.load[rank] == pytest.approx(said)
    assert over_caps(problem, found.placed) == [0, 0]
    whole = Problem([specs[n] for n in canonical(specs)], ranks, made)
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


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr(training, "EPOCHS", 60)
    monkeypatch.setattr(training, "RATE", 1e-2)


def test_a_net_learns_what_a_sum_cannot_say(monkeypatch):
    monkeypatch.setattr(training, "DROPPED", 0.0)
    learned, other = known(120, 0), known(60, 1)
    made = trained(learned, 0)

    def off(net: ComputeNet | None) -> float:
        return float(np.median(np.abs(other.told(net) / other.ms - 1)))

    assert off(made) < 0.03 < 0.15 < off(None)
    monkeypatch.setattr(training, "TUNED", 5)
    assert off(trained(known(40, 2), 0, made)) < 0.04  # training continues rather than starting over


def test_ties_go_to_the_sum():
    off = np.random.default_rng(0).random(400) * 0.2
    wobble = np.resize([0.03, -0.03], 400)
    assert chosen(off, off - 0.01)[0] == "net"
    assert [chosen(off, off + by)[0] for by in (wobble - 0.001, wobble + 0.001, 0.01)] == ["additive"] * 3
    assert "a tie goes to the sum" in chosen(off, off + wobble - 0.001)[1] and "tie" not in chosen(off, off + 0.01)[1]
    one = np.append(off, 0.1), np.append(off - 0.001, 9.0)  # one outlier does not decide
    assert chosen(*one)[0] == "additive" and chosen(*one)[1].count("+-") == 1


def written(tmp_path, change, *, sealed=True):
    save_costs(costs(2), tmp_path / "c.json")
    body = json.loads((tmp_path / "c.json").read_text())
    change(body)
    if not sealed:
        del body["digest"]
    (tmp_path / "c.json").write_text(json.dumps(body))
    return tmp_path / "c.json"


def test_costs_with_nets_come_back(tmp_path):
    wire = wire_fit.wire_of(*exchanges(30, 0.0), seed=0)
    made = replace(costs(2), wire=wire)
    save_costs(made, tmp_path / "c.json")
    found = load_costs(tmp_path / "c.json", link=1e8, ranks=2)
    sets = [[(spec(1), 500, 12), (spec(2), 3000, 64)]]
    assert found.kind == "net" and found.report == {"why": "drawn"}
    assert found.together(sets) == pytest.approx(made.together(sets), rel=1e-5)
    assert found.wire is not None and found.wire.nets is not None
    some, starts = np.array([[1e4, 9e4]]), np.array([[0.0, 2.0]])
    assert np.allclose(found.wire.told(some, starts), wire.told(some, starts), rtol=1e-5)


def test_a_plan_by_measured_exchange(tmp_path, capsys):
    specs = [spec(n, 500 + n, 8 + 4 * n) for n in range(4)]
    (tmp_path / "t.json").write_text(specs_text(specs))
    wire = Wire(2, 0.5, 1e-4, 0.1, 0.1)
    save_costs(replace(costs(2), wire=wire), tmp_path / "c.json")
    flags = ["--costs", str(tmp_path / "c.json"), "--link", "measured", "--out", str(tmp_path / "p.json"), "--json"]
    assert main(["place", "tables", str(tmp_path / "t.json"), *flags]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    plan = TablePlan.load(tmp_path / "p.json")
    sends = np.array([[sum(32 * p.dim * 4 / 2 for of in plan.pieces for p, at in of if at == r) for r in range(2)]])
    starts = np.array([[rank["compute_ms"] for rank in found["ranks"]]])
    forward, backward = wire.told(sends, starts)
    assert [rank["forward_ms"] for rank in found["ranks"]] == pytest.approx(forward[0].tolist())
    assert [rank["backward_ms"] for rank in found["ranks"]] == pytest.approx(backward[0].tolist())
    assert found["costs"] == "net" and found["exchange"]["kind"] == "latency and rate"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body["net"].update(features=["dim"]), r"its net has features dim, ... \(1\), skirl has log rows"),
        (lambda body: body["net"]["each"]["first"].update(shape=[1 << 40, 31]), "the size of its net's first is not"),
        (lambda body: body["net"]["head"].pop("last"), "its net has no last"),
        (lambda body: body["net"]["head"]["last_bias"].update(float32="AAD4fw=="), "last_bias that is not finite"),
        (
            lambda body: body["net"]["head"]["last_bias"].update(float32="****AA=="),
            "last_bias does not hold its numbers in base64",
        ),
        (lambda body: body["net"].update(deviation=packed(np.zeros(len(FEATURES)))), "a deviation of 0 or less"),
        (
            lambda body: body.update(net=None),
            "kind of costs is 'net': set it to additive, or to net with a trained net",
        ),
        (lambda body: body.update(chosen="best"), "kind of costs is 'best'"),
        (lambda body: body.update(exchange={"ranks": 2}), "its exchange is wrong, latency is missing"),
        (lambda body: body.update(noise=-1), "its noise is -1"),
    ],
)
def test_wrong_nets_are_refused(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        load_costs(written(tmp_path, change, sealed=False), link=1e8, ranks=2)


def test_costs_that_were_changed_or_cut_are_refused(tmp_path):
    path = written(tmp_path, lambda body: body["ms"].update(sgd=[1.0] * len(TERMS)))
    with pytest.raises(ValueError, match="it was changed since it was written"):
        load_costs(path, link=1e8, ranks=2)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(ValueError, match="is cut short, or is not JSON"):
        load_costs(path, link=1e8, ranks=2)
    path.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(ValueError, match="is too large for costs"):
        load_costs(path, link=1e8, ranks=2)


def exchanges(cases: int, jitter: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return exchanges of two ranks that take 1 ms plus 2 ms per MB of the larger one, and half as much again if both
    are equal."""
    rng = np.random.default_rng(5)
    dims, starts = wire_fit.cases_of(2, cases, rng)
    nbytes = sent(dims, 512)
    alike = 1 + 0.5 * nbytes.min(axis=1) / nbytes.max(axis=1)
    moved = ((1 + 2e-6 * nbytes.max(axis=1)) * alike)[:, None] * np.ones(2)
    rounds = np.stack([moved + starts.max(axis=1, keepdims=True) - starts, moved])
    return nbytes, starts, rounds * rng.lognormal(0, jitter, (6, *rounds.shape)) if jitter else rounds[None]


def test_no_net_is_trained_on_noise():
    wire = wire_fit.wire_of(*exchanges(60, 0.6), seed=0)
    assert not wire.validated and wire.nets is None and wire.said()["kind"] == "unvalidated"


def test_nets_of_exchanges_learn_what_a_rate_cannot_say(monkeypatch):
    monkeypatch.setattr(training, "EPOCHS", 250)
    calm = wire_fit.wire_of(*exchanges(60, 0.0), seed=0)
    plain = replace(calm, nets=None)
    assert calm.validated and calm.nets is not None and calm.said()["kind"] == "nets"
    nbytes, starts, rounds = exchanges(60, 0.0)
    errors = [np.abs(np.stack(of.told(nbytes, starts)) / rounds[0] - 1).mean() for of in (calm, plain)]
    assert errors[0] < 0.6 * errors[1]


def test_an_exchange_waits_for_the_last_and_for_the_most():
    wire = Wire(2, 1.0, 1e-6, 0.1, 0.1)
    forward, backward = wire.told(np.array([[1e6, 3e6]]), np.array([[5.0, 2.0]]))
    assert forward.tolist() == [[4.0, 7.0]] and backward.tolist() == [[4.0, 4.0]] and wire.rate == pytest.approx(1e9)
    rng = np.random.default_rng(0)
    nets = WireNets(np.zeros(4), np.ones(4), drawn(rng, 4, UNITS, 2), drawn(rng, 2, UNITS, 2))
    again = Wire.parsed(json.loads(json.dumps(replace(wire, nets=nets).body())))
    assert again.nets is not None and again.nets.forward.first.shape == (UNITS, 4)


@pytest.mark.slow  # two interpreters with torch
def test_processes_exchange_and_are_timed():
    wire = wire_fit.measured(2, 64, seed=0, cases=10, rounds=3)
    assert wire.ranks == 2 and wire.per_byte > 0 and wire.said()["kind"] in ("unvalidated", "latency and rate", "nets")
