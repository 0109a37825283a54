"""Measured ranks of plans: what is taken of the rounds, when measuring ends, and what both halves tell."""

from dataclasses import replace

import numpy as np
import pytest

from skirl.placement.tables import bench_plans, measure, timed
from skirl.placement.tables.bench_search import LINK, problem_of
from skirl.placement.tables.measure import Lookups, MeasuredTables, Sentinel
from skirl.placement.tables.pool import pool, task
from skirl.placement.tables.problem import canonical


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 8, 32])
def test_the_least_third_is_that_of_each_rank(rounds):
    ms = np.random.default_rng(rounds).random((rounds, 5, 2))
    for n, r in np.ndindex(5, 2):
        few = sorted(ms[:, n, r].tolist())[: (rounds + 2) // 3]
        assert timed.least_third(ms)[n, r] == pytest.approx(sum(few) / len(few))


class Planted(MeasuredTables):
    """Each rank takes the milliseconds that are planted for as many parts as it has, the first ones to warm up."""

    clock = staticmethod(lambda: 0.0)

    def __init__(self, ms):
        super().__init__(1 << 12)
        self.ms, self.built = {parts: [0.0, *of] for parts, of in ms.items()}, 0

    def together(self, parts):
        self.built += 1
        return parts

    def run_ms(self, parts):
        return self.ms[len(parts)].pop(0)


def planned(ranks):
    made = task(pool(3, batch=16, max_dim=16, seed=1), 3, ranks, np.random.default_rng(0))
    problem = problem_of(made)
    return made, problem, {"a": problem.at(problem.root(), np.array([0, 1, 1]))}


def test_plans_are_measured_until_both_halves_tell_the_same(monkeypatch):
    made, problem, plans = planned(2)
    arena = Planted({1: [4.0, 6.0] * 2 + [3.0] * 4 + [1.0] * 9, 2: [8.0, 9.0] * 2 + [7.0] * 4 + [1.0] * 9})
    sentinels = list[Sentinel]()
    monkeypatch.setattr(measure, "Sentinel", lambda arena: sentinels.append(Sentinel(arena)) or sentinels[-1])
    found = timed.measure(arena, made, problem, plans, 0)
    # Of 8 rounds, halves of 4 tell 3 and 7: by the mean of the least two of each.
    assert len(found.rounds) == 8 and found.noise() == 0 and arena.built == 2 and len(sentinels) == 1
    lookups = [Lookups(made.tables[n], k) for k, n in enumerate(canonical(made.specs))]
    away = [len({bag for bag in of.bags.tolist() if (bag >= 8) != rank}) for of, rank in zip(lookups, (0, 1, 1))]
    ms = [2e3 * count * spec.dim * 4 / LINK for count, spec in zip(away, problem.specs, strict=True)]
    exchange = [ms[0], ms[1] + ms[2]]
    assert found.times()["a"] == pytest.approx(
        (max(3 + exchange[0], 7 + exchange[1]), (10 + sum(exchange)) / 2, max(exchange), 7)
    )
    dense = [2e3 * 8 * spec.dim * 4 / LINK for spec in problem.specs]  # a vector for each of the other rank's samples
    assert found.dense.tolist() == [[pytest.approx(dense[0]), pytest.approx(dense[1] + dense[2])]]
    arena = Planted({1: [2.0, 3.0] * 16, 2: [2.0, 3.0] * 16})
    assert len(timed.measure(arena, made, problem, plans, 0).rounds) == timed.MOST_ROUNDS


def test_ranks_without_tables_do_not_count():
    made, problem, plans = planned(5)
    arena = Planted({0: [1e-4, 9e-4] * 48, 1: [4.0] * 16, 2: [8.0] * 16})
    found = timed.measure(arena, made, problem, plans, 0)
    assert len(found.rounds) == timed.PLAN_ROUNDS and found.noise() == 0
    assert found.rounds[:, 0].tolist() == [[4.0, 8.0, 0.0, 0.0, 0.0]] * timed.PLAN_ROUNDS


def by_hand(ms: list[float], part: slice) -> float:
    few = sorted(ms[part])[: (len(ms[part]) + 2) // 3]
    return sum(few) / len(few)


def test_halves_of_the_rounds_and_the_least_round_are_told_beside():
    rng = np.random.default_rng(5)
    names = ("random", "size", "dim", "lookup", "size_lookup", "additive_lpt", "row_wise", *bench_plans.OURS, "checked")
    shape = (len(names), 2)
    tasks = [
        timed.TimedPlans(
            names, 1 + rng.random((8, *shape)), rng.random(shape), np.zeros((*shape, 2)), rng.random(shape)
        )
        for _ in "abc"
    ]
    told = bench_plans.again(["a", "a", "b"], tasks)

    def ratio(of: timed.TimedPlans, part: slice, which: int, take=by_hand) -> float:
        def busiest(name: str) -> float:
            n = names.index(name)
            return max(take(of.rounds[:, n, r].tolist(), part) + of.exchange[n, r] for r in range(2))

        return busiest("rows") / busiest(names[which])

    row_wise = names.index("row_wise")
    for half, part in zip(told["by_halves"], (slice(0, None, 2), slice(1, None, 2)), strict=True):
        wanted = np.mean([ratio(of, part, row_wise) for of in tasks])
        assert half["vs_row_wise"] == pytest.approx(wanted)
    least = np.mean([ratio(of, slice(None), row_wise, lambda ms, part: min(ms)) for of in tasks])
    assert told["by_minimum"]["vs_row_wise"] == pytest.approx(least) and told["rounds"] == 8
    assert told["by_halves"][0] != told["by_halves"][1]

    dense = bench_plans._dense(["a", "a", "b"], tasks)
    swapped = [replace(of, exchange=of.dense) for of in tasks]
    assert dense["vs_row_wise"] == pytest.approx(np.mean([ratio(of, slice(None), row_wise) for of in swapped]))

    differ = [
        abs(one - other) / min(one, other)
        for ms in tasks[0].rounds.reshape(8, -1).T.tolist()
        for one, other in [(by_hand(ms, slice(0, None, 2)), by_hand(ms, slice(1, None, 2)))]
    ]
    assert tasks[0].noise() == pytest.approx(np.median(differ))
