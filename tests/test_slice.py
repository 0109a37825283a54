"""The share of a campaign that a commit's hash chooses."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests import slice as share
from tests.cases import GROWTH, cases
from tests.slice import CEILING, SLOW, chosen, ending, estimated, part_of, recorded

COSTS = {f"tests/test_{n % 7}.py::test_{n}": 0.5 + n % 5 for n in range(400)}
SEEDS = [f"{n:040x}" for n in range(60)]


@given(
    costs=st.dictionaries(st.text(min_size=1), st.floats(0, 1e4), max_size=40),
    seconds=st.floats(0, 1e4),
    seed=st.text("0123456789abcdef"),
)
@cases(200)
def test_the_budget_is_kept_and_the_choice_repeats(costs: dict[str, float], seconds: float, seed: str) -> None:
    names = chosen(costs, seconds, seed)
    assert sum(costs[name] for name in names) <= seconds * (1 + 1e-9)
    assert chosen(dict(reversed(costs.items())), seconds, seed) == names
    left = seconds - sum(costs[name] for name in names)
    assert all(costs[name] >= min(left, seconds / 3) * (1 - 1e-9) for name in costs.keys() - names)  # nothing else fits


def test_commits_choose_differently_and_leave_no_test_out() -> None:
    choices = [chosen(COSTS, 100, seed) for seed in SEEDS]
    assert len(set(map(frozenset, choices))) == len(SEEDS)
    assert len(set().union(*choices)) > 0.95 * len(COSTS)
    assert all(20 <= len(names) < 100 for names in choices)
    assert {part_of(seed, 8) for seed in SEEDS} == set(range(8))


def test_no_test_is_too_long_for_a_slice() -> None:
    assert chosen({"short": 1, "long": 40}, 100, "a") == {"short"}


def test_seconds_come_from_a_campaign_s_report(tmp_path: Path) -> None:
    assert recorded(tmp_path / "none.json") == {}
    (tmp_path / "r.json").write_text(json.dumps({"tests": [{"test": "a", "seconds": 2.5, "outcome": "passed"}]}))
    assert recorded(tmp_path / "r.json") == {"a": 2.5}


def as_item(obj: object = None, name: str = "t", marks: tuple[str, ...] = ()) -> Any:
    """Return the parts of a collected test that a slice uses."""
    closest = lambda mark: mark if mark in marks else None  # noqa: E731
    return SimpleNamespace(nodeid=name, obj=obj, function=obj, get_closest_marker=closest)


def test_seconds_of_a_campaign_are_guessed_by_those_of_make_test() -> None:
    @given(st.integers())
    def drawn(n: int) -> None: ...

    def inside() -> None:
        cases(300)(drawn)

    known = {"t": 2.0}
    assert estimated(as_item(), known, {}) == 2 and estimated(as_item(), known, {"t": 9.0}) == 9
    assert estimated(as_item(drawn), known, {}) == min(CEILING, 2 * GROWTH)
    assert estimated(as_item(inside), {"t": 25.0}, {}) == 25 * GROWTH > CEILING
    assert estimated(as_item(marks=("slow",)), {}, {}) == SLOW and estimated(as_item(marks=("slow",)), known, {}) == 2


@pytest.mark.parametrize("fails", [False, True])
def test_random_cases_end_in_time_and_a_failure_is_told_all_the_same(fails: bool) -> None:
    ran: list[int] = []

    @settings(max_examples=1000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers())
    def drawn(n: int) -> None:
        ran.append(n)
        time.sleep(0.002)
        assert not fails or n < 10, "ten"

    inner = drawn.hypothesis.inner_test  # pyright: ignore[reportFunctionMemberAccess]
    until = time.monotonic() + (10 if fails else 0.05)
    error, says = (AssertionError, "ten") if fails else (pytest.skip.Exception, "time has passed")
    with pytest.raises(error, match=says), ending(as_item(drawn), until):
        drawn()
    assert ran and len(ran) < 1000
    assert drawn.hypothesis.inner_test is inner  # pyright: ignore[reportFunctionMemberAccess]


def test_the_time_may_pass_within_a_case_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases begin alike, so one that stopped before its draws would contradict an earlier one."""
    begun: list[int] = []
    ended: list[int] = []
    monkeypatch.setattr(share, "time", SimpleNamespace(monotonic=lambda: len(begun)))

    @settings(max_examples=1000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 1), st.data())
    def drawn(n: int, data: st.DataObject) -> None:
        begun.append(n)
        values = data.draw(st.lists(st.integers()))
        assume(len(values) != 1)
        ended.append(n)

    with pytest.raises(pytest.skip.Exception, match=r"its time has passed: \d+ cases"), ending(as_item(drawn), 30):
        drawn()
    assert 30 < len(begun) < 100 and ended[-1] == begun[-1]
