"""How long tests take. tests/seconds.txt lists tests of two seconds and more; `make seconds` writes it again.

With it, tests/forks.py starts the longest tests first, and tests/slice.py knows what fits. It need not be exact: a test
that it does not list counts as short.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("seconds.txt")
LEAST = 2.0
"""Tests are recorded from this many seconds on."""
BRIEF = 0.3
"""Seconds assumed for a test that is not recorded."""


def recorded(path: Path = TABLE) -> dict[str, float]:
    """Return the recorded seconds of tests, by name."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {test: float(seconds) for seconds, test in (line.split(maxsplit=1) for line in lines)}


def merged(old: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """Return the table after a run: tests that ran get their new seconds, the others keep the old ones."""
    both = {**old, **found}
    return {test: both[test] for test in sorted(both) if both[test] >= LEAST}


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """Write one line per test, in whole seconds, so that the next run changes few of them."""
    path.write_text("".join(f"{value:4.0f} {test}\n" for test, value in seconds.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption("--record-seconds", action="store_true", help="write how long tests took to tests/seconds.txt")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--record-seconds"):
        old = {test: n for test, n in recorded().items() if (config.rootpath / test.partition("::")[0]).is_file()}
        found: dict[str, float] = defaultdict(float)
        for report in (*terminalreporter.stats.get("", ()), *terminalreporter.stats.get("passed", ())):
            found[report.nodeid] += report.duration  # including the fixtures made for it
        write(TABLE, merged(old, found))
        terminalreporter.write_line(f"seconds: {TABLE}")
