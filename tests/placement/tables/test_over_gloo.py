"""Exchanges of plans over gloo: what is sent, what is told of it, and when it is not trusted."""

from typing import Any

import numpy as np
import pytest

from skirl.placement.tables import bench_plans, gloo, wire_fit
from skirl.placement.tables.over_gloo import over_gloo
from skirl.placement.tables.timed import TimedPlans

NAMES = ("random", "size", "dim", "lookup", "size_lookup", "additive_lpt", "row_wise", *bench_plans.OURS, "checked")


def tasks_of(rng: np.random.Generator, counts: list[int]) -> list[TimedPlans]:
    found = []
    for ranks in counts:
        shape = (len(NAMES), ranks)
        sent = rng.integers(1000, 90000, (*shape, ranks))
        found.append(TimedPlans(NAMES, 1 + rng.random((4, *shape)), np.ones(shape), sent, np.ones(shape)))
    return found


def wire(jitter: float, asked: list[Any]):
    """Return a machine whose ranks take 1 ms and 1 us for 100 bytes that one of them sends away, and what it asks."""

    def exchanged(sent: np.ndarray, starts: np.ndarray, rounds: int, seconds: float) -> np.ndarray:
        asked.append(sent)
        assert not starts.any()
        away = 4e-5 * np.array([[sum(of[r]) - of[r, r] for r in range(len(of))] for of in sent])
        ms = np.repeat(1 + away.max(axis=1, keepdims=True), sent.shape[1], axis=1)
        noise = np.random.default_rng(1).lognormal(0, jitter, (rounds, 2, *ms.shape))
        return ms * noise

    return exchanged


@pytest.mark.parametrize("jitter", [1e-6, 0.02])
def test_what_repeats_is_told_as_it_was_measured_and_no_net_is_trained(monkeypatch, jitter):
    monkeypatch.setattr(wire_fit, "regressed", lambda *of: pytest.fail("a net was trained"))
    tasks, asked = tasks_of(np.random.default_rng(0), [2, 3, 2]), list[Any]()
    exchange, told = over_gloo(tasks, 0, wire(jitter, asked))
    assert [len(sent) for sent in asked] == [2 * len(NAMES), len(NAMES)]
    assert [told[count]["kind"] for count in ("2", "3")] == ["measured"] * 2
    for task, ms in zip(tasks, exchange, strict=True):
        for sent, of in zip(task.sent, ms, strict=True):
            most = max(sum(sent[r]) - sent[r, r] for r in range(len(sent)))
            assert of == pytest.approx(2 * (1 + 4e-5 * most), rel=5 * jitter)


def test_what_does_not_repeat_is_a_latency_and_a_rate_and_says_so(monkeypatch):
    tasks, asked = tasks_of(np.random.default_rng(0), [2] * 4), list[Any]()
    monkeypatch.setattr(bench_plans, "over_gloo", lambda tasks, seed: over_gloo(tasks, seed, wire(0.6, asked)))
    found = bench_plans.exchanged(["a"] * 4, tasks, 0)
    of = found["by_ranks"]["2"]
    assert found["kind"] == of["kind"] == "unvalidated" and of["noise"] > 0.25
    row_wise, rows = (NAMES.index(name) for name in ("row_wise", "rows"))

    def busiest(task: TimedPlans, n: int) -> float:
        most = max(task.sent[n, r].sum() - task.sent[n, r, r] for r in range(2)) * 4
        both = 2 * (of["latency_ms"] + 1e3 * most / of["bytes_a_second"])
        return max(np.sort(task.rounds[:, n, r])[:2].mean() + both for r in range(2))

    wanted = np.mean([busiest(task, rows) / busiest(task, row_wise) for task in tasks])
    assert found["vs_row_wise"] == pytest.approx(wanted)


def test_figures_of_computing_are_kept_where_processes_fail(monkeypatch):
    def fails(*args: Any) -> Any:
        raise RuntimeError("a process that exchanges rows failed; its error is above")

    monkeypatch.setattr(bench_plans, "over_gloo", fails)
    assert bench_plans.exchanged(["a"], [], 0) == {
        "not_run": "a process that exchanges rows failed; its error is above"
    }


@pytest.mark.slow  # three interpreters with torch
def test_processes_send_what_they_are_told():
    sent = np.random.default_rng(0).integers(0, 300, (4, 3, 3))
    sent[0] = 0
    ms = gloo.exchanged(sent, np.full((4, 3), 2.0), 2, 60.0)
    assert ms.shape == (2, 2, 4, 3) and (ms > 0).all()
