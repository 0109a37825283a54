"""A pytest plugin for `make slice`: `--slice SECONDS --slice-seed HASH` runs a share of the tests, chosen by the hash.

The same hash chooses the same tests on every machine, and other commits choose others. SECONDS are those of two cores.
A chosen test is skipped if it would begin later than SECONDS after the choice. A test of random cases ends with the
first case that passes after `CEILING` seconds, or after the slice's time, and is then reported as skipped: none of its
cases has failed.
"""

import inspect
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis.errors import StopTest, UnsatisfiedAssumption

from tests import seconds
from tests.cases import GROWTH

CORES = 2
SLOW = 60.0
"""Seconds assumed for a test marked slow without a recorded time."""
CEILING = 200.0
"""Most seconds of one test of random cases, well below the limit at which a test counts as hanging."""
LEAST = 20.0
"""Seconds that the last such test gets, whatever is left of the slice."""
RECORD = Path("campaign-report.json")
"""The report of `make campaign`, which gives the seconds of tests if it exists."""


def chosen(costs: Mapping[str, float], seconds: float, seed: str) -> set[str]:
    """Choose tests in an order that depends on the seed, each one that still fits into the seconds left.

    No test takes more than a third of the seconds, so that the last to begin does not run on for long.
    """
    names, left = set(), seconds
    for name in sorted(costs, key=lambda name: sha256(f"{seed} {name}".encode()).digest()):
        if costs[name] <= min(left, seconds / 3):
            names.add(name)
            left -= costs[name]
    return names


def part_of(seed: str, parts: int) -> int:
    """Return which of `parts` equal parts a seed stands for."""
    return int.from_bytes(sha256(seed.encode()).digest()[:8], "big") % parts


def recorded(path: Path) -> dict[str, float]:
    """Return the seconds of each test from a campaign's report; empty if there is none."""
    if not path.is_file():
        return {}
    return {test["test"]: test["seconds"] for test in json.loads(path.read_text())["tests"]}


def estimated(item: pytest.Item, known: Mapping[str, float], campaign: Mapping[str, float]) -> float:
    """Estimate a test's seconds in a campaign, from its report or scaled up from `make test`, which draws fewer cases."""
    if item.nodeid in campaign:
        return campaign[item.nodeid]
    if item.nodeid not in known and item.get_closest_marker("slow"):
        return SLOW
    here = known.get(item.nodeid, seconds.BRIEF)
    if draws(item):
        return min(CEILING, here * GROWTH)
    function = getattr(item, "function", None)
    return here * GROWTH if function is not None and "cases(" in inspect.getsource(function) else here


def draws(item: pytest.Item) -> bool:
    """Return whether Hypothesis draws a test's cases and can be told to stop. It cannot if the test calls it inside."""
    return hasattr(getattr(item, "obj", None), "hypothesis")


@contextmanager
def ending(item: pytest.Item, until: float) -> Iterator[None]:
    """Skip a test of random cases once a case has passed later than `until`, unless an earlier one has failed.

    The skip comes where a case ends. Earlier in a case, Hypothesis could miss draws that an equal beginning had before,
    and would report the test as flaky; the same holds for a case that it rejects.
    """
    handle = item.obj.hypothesis  # pyright: ignore[reportAttributeAccessIssue]
    inner, cases, failed = handle.inner_test, 0, False

    @wraps(inner)
    def case(*args: Any, **named: Any) -> Any:
        nonlocal cases, failed
        cases += 1
        try:
            result = inner(*args, **named)
        except (StopTest, UnsatisfiedAssumption):
            raise
        except BaseException:
            failed = True
            raise
        if not failed and time.monotonic() > until:
            pytest.skip(f"its time has passed: {cases:,} cases, and none of them failed")
        return result

    handle.inner_test = case
    try:
        yield
    finally:
        handle.inner_test = inner


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption(
        "--slice", type=float, metavar="SECONDS", help="run as many tests as fit into this time on two cores"
    )
    group.addoption("--slice-seed", default="0", metavar="HASH", help="what chooses them")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slice") is not None:
        config.pluginmanager.register(_Slice(config), "skirl-slice")


class _Slice:
    """The tests chosen, and their time limit."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: float = config.getoption("--slice")
        self._seed: str = config.getoption("--slice-seed")
        self._begin = 0.0
        self._counts = (0, 0)

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known, campaign = seconds.recorded(), recorded(config.rootpath / RECORD)
        costs = {item.nodeid: estimated(item, known, campaign) for item in items}
        names = chosen(costs, self._seconds * CORES, self._seed)
        self._begin = time.monotonic()
        self._counts = (sum(item.nodeid in names for item in items), len(items))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self._begin > self._seconds:
            pytest.skip("the slice's time has passed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if not draws(item):
            return (yield)
        now = time.monotonic()
        with ending(item, now + min(CEILING, max(LEAST, self._begin + self._seconds - now))):
            return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of = "{:,} of {:,} tests".format(*self._counts)
        terminalreporter.write_line(f"slice {self._seed}: {of} were chosen for {self._seconds:g} s")
