"""A pytest plugin for `make slice`: `--slice SECONDS --slice-seed HASH` runs a share of the tests that the hash chooses.

The same hash chooses the same tests on every machine, and other commits choose others. SECONDS are those of two cores. A
test that is chosen and whose turn comes later than SECONDS after the choice is skipped.
"""

import json
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

CORES = 2
COST, SLOW_COST = 4.0, 60.0
"""Seconds of a test that no campaign's report names, and of one marked slow."""
RECORD = Path("campaign-report.json")
"""Seconds of tests are taken from it where `make campaign` has left one."""


def chosen(costs: Mapping[str, float], seconds: float, seed: str) -> set[str]:
    """Names in an order that depends on the seed, each that the seconds still have room for.

    No test takes more than a third of the seconds, so that the last to begin does not run on for long.
    """
    names, left = set(), seconds
    for name in sorted(costs, key=lambda name: sha256(f"{seed} {name}".encode()).digest()):
        if costs[name] <= min(left, seconds / 3):
            names.add(name)
            left -= costs[name]
    return names


def part_of(seed: str, parts: int) -> int:
    """Which of so many equal parts a seed stands for."""
    return int.from_bytes(sha256(seed.encode()).digest()[:8], "big") % parts


def recorded(path: Path) -> dict[str, float]:
    """Seconds of each test by a campaign's report; none where there is no report."""
    if not path.is_file():
        return {}
    return {test["test"]: test["seconds"] for test in json.loads(path.read_text())["tests"]}


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
    """The choice."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: float = config.getoption("--slice")
        self._seed: str = config.getoption("--slice-seed")
        self._begin = 0.0
        self._counts = (0, 0)

    @pytest.hookimpl(trylast=True)  # behind -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = recorded(config.rootpath / RECORD)
        costs = {i.nodeid: known.get(i.nodeid, SLOW_COST if i.get_closest_marker("slow") else COST) for i in items}
        names = chosen(costs, self._seconds * CORES, self._seed)
        self._begin = time.monotonic()
        self._counts = (sum(item.nodeid in names for item in items), len(items))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
        items[:] = [item for item in items if item.nodeid in names]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() - self._begin > self._seconds:
            pytest.skip("the slice's time has passed")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of = "{:,} of {:,} tests".format(*self._counts)
        terminalreporter.write_line(f"slice {self._seed}: {of} were chosen for {self._seconds:g} s")
