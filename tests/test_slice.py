"""The share of a campaign that a commit's hash chooses."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.slice import chosen, part_of, recorded

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
