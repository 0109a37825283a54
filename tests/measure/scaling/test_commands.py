"""`skirl simulate`: its counts match plain sets, and its times are sums and maxima that a reader can check by hand."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skirl.cli import main
from skirl.core.placement import Placement
from skirl.measure.bench.movement import CountSettings, ids_of
from skirl.measure.scaling import machine_costs, traffic
from skirl.measure.scaling.commands import Simulate
from skirl.measure.scaling.iteration import StepCosts, bends, changes, step_of
from skirl.measure.scaling.traffic import KINDS, StepTraffic, all_critical, traffic_of
from skirl.store.link import Link
from tests.cases import cases

NONE: dict[str, float] = dict.fromkeys(KINDS, 0.0)


@pytest.mark.parametrize("trainers", [2, 4])
def test_bytes_are_those_of_sets(trainers):
    found = traffic_of(trainers, 8, 4, 100, rows_scale=0.001)
    task = CountSettings(trainers, 8, 1, 16, 2, rows_scale=0.001)
    steps = [[set(part.keys().tolist()) for part in batch] for batch in ids_of(task.source, trainers)]
    placement = Placement.even(trainers)
    wanted, words = dict.fromkeys(KINDS, 0), 0
    for t, step in enumerate(steps):
        union = [set.union(*near) for near in (steps[t - 1], steps[(t + 1) % len(steps)])]
        for reader, rows in enumerate(step):
            keys = sorted(rows)
            remote = [key for key, o in zip(keys, placement.site_of(np.array(keys)).tolist()) if o != reader]
            words += len(remote) + (trainers - 1) * (4 + 26)
            if 2 <= t < 18:
                for key in remote:
                    wanted["values_critical" if key in union[0] else "values_early"] += 1
                    wanted["gradients_critical" if key in union[1] else "gradients_late"] += 1
    for kind in KINDS[:4]:
        assert found.bytes[kind] == pytest.approx(wanted[kind] * 4 * 4 / 16 / trainers)
    assert found.bytes["ids"] == pytest.approx(4 * words / len(steps) / trainers)
    assert found.bytes["dense"] == pytest.approx(2 * 400 * (trainers - 1) / trainers)
    assert found.vectors == pytest.approx(sum(wanted[kind] for kind in KINDS[:4]) / 16 / trainers)
    assert found.busiest >= 1 and found.plan_ms > 0
    waiting = all_critical(found)
    assert sum(waiting.bytes.values()) == pytest.approx(sum(found.bytes.values()))
    assert waiting.bytes["values_early"] == waiting.bytes["gradients_late"] == 0


def test_the_time_of_a_step_by_hand():
    link, costs = Link(1000.0, 0.01), StepCosts(0.5, 0.4, 0.001, 0.0001, 2.0, 0.05)
    given = StepTraffic(3, NONE | {"values_critical": 50.0, "dense": 50.0, "gradients_late": 300.0}, 10.0, 1.0, 0.0)
    step = step_of(given, costs, link)
    waits = 5 * 2 * 0.001 + 4 * 0.01  # five messages to each of the two others, and four times the delay
    assert step.parts["critical_wire"] == pytest.approx(0.1) and step.parts["messages"] == pytest.approx(waits)
    assert step.seconds == pytest.approx(0.5 + 0.1 + waits) and step.bound == "compute"
    assert step.parts["planning"] == pytest.approx(0.05 + 6 * 2 * 0.001)
    assert step.parts["cores"] == pytest.approx((0.4 + 0.05 + 11 * 2 * 0.001 + 0.04) / 2)
    waiting = step_of(all_critical(given), costs, link)
    assert waiting.seconds == pytest.approx(0.5 + 0.4 + waits)
    slow = step_of(given, costs, Link(100.0))
    assert slow.seconds == pytest.approx(3.0 + 1.0 + 0.01) and slow.bound == "wire"
    assert step_of(given, StepCosts(0.5, 0.4, 0.001, 0, 2.0, 7.0), link).bound == "planning"
    assert step_of(given, StepCosts(0.5, 0.4, 0.001, 0, 0.01, 0.05), link).bound == "cores"
    assert step_of(given, StepCosts(0.5, 0.4, 0.1, 0, 99.0, 0.05), link).bound == "messages"
    alone = step_of(StepTraffic(1, NONE, 0.0, 1.0, 0.0), costs, link)
    assert alone.seconds == 0.5 and bends([alone]).endswith("it does not bend up to 1")
    assert bends([alone, step]).endswith("from 3 on it takes over 1.1 times as long because of critical rows and dense "
                                         "gradients on the wire")  # fmt: skip
    assert changes([alone, slow]) == [(3, "compute", "wire")]


@cases(100)
@given(
    sizes=st.lists(st.floats(0, 1e6), min_size=len(KINDS), max_size=len(KINDS)), trainers=st.integers(1, 512),
    rate=st.floats(1e3, 1e9), compute=st.floats(1e-3, 1.0),
)  # fmt: skip
def test_a_step_is_never_shorter_than_what_bounds_it(sizes, trainers, rate, compute):
    given_ = StepTraffic(trainers, dict(zip(KINDS, sizes)), 1.0, 1.0, 3.0)
    costs = StepCosts(compute, compute, 1e-5, 1e-9, 2.0)
    step = step_of(given_, costs, Link(rate))
    assert step.seconds >= max(compute, sum(sizes) / rate, 0.003) * (1 - 1e-9)
    assert step_of(all_critical(given_), costs, Link(rate)).seconds >= step.seconds * (1 - 1e-9)
    assert step_of(given_, costs, Link(2 * rate)).seconds <= step.seconds


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine_costs, "computed", lambda *_: (0.02, 0.02))
    monkeypatch.setattr(machine_costs, "talked", lambda: (2e-5, 1e-9))
    path = tmp_path / "curve.svg"
    flags = [
        "simulate",
        "--trainers",
        "2",
        "4",
        "--samples",
        "16",
        "--dim",
        "8",
        "--dense",
        "1000",
        "--plot",
        str(path),
    ]
    assert main([*flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["step_ms"]) == ["2", "4"] and result["step_ms"]["4"] >= 20
    assert set(result["bytes"]["4"]) == set(KINDS) and result["costs"]["message"] == 2e-5
    assert path.read_text().count("<polyline") == 3 + 5 + 4
    assert main(flags) == 0
    assert "4 trainers" in (said := capsys.readouterr().out) and "it bends" in said


def test_what_is_executed_stands_beside_what_is_predicted(monkeypatch):
    turn = {"seconds": 0.05, "cpu": 0.04, "waited": {"rows": 0.01, "dense": 0.0}}
    moved = {"rows": 1000.0, "moves": 500.0, "dense": 4000.0}
    rank = {"local": turn, "hidden": turn | {"sent": moved, "received": moved}, "losses": [0.0]}
    monkeypatch.setattr("skirl.measure.bench.link.trained", lambda size, *_: [[rank]] * size)
    monkeypatch.setattr(traffic, "SAMPLED", 2)
    facts = Simulate(samples=8, dim=4, dense=1000)._executed(2, StepCosts(0.05, 0.04, 1e-5, 1e-9, 2.0))
    assert facts["measured_ms"] == 50 and facts["predicted_ms"] >= 50
    assert facts["measured_row_bytes"] == 1500 and facts["predicted_row_bytes"] > 0
    assert facts["measured_dense_bytes"] == facts["predicted_dense_bytes"] == 4000


def test_wrong_flags_are_named():
    with pytest.raises(ValueError, match="set it to rising numbers"):
        Simulate(trainers=(8, 2))
    with pytest.raises(ValueError, match="link is 'fast'"):
        Simulate(link="fast")
    with pytest.raises(ValueError, match="executed is"):
        Simulate(executed=(3,))
