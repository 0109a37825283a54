"""How long tests take: tests/seconds.txt has those of two seconds and more, and `make seconds` writes it anew.

tests/forks.py lets the longest begin first by it, and tests/slice.py knows what fits. It need not be exact: a test that it
does not name is taken for a brief one.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("seconds.txt")
LEAST = 2.0
"""Seconds from which on a test is recorded."""
BRIEF = 0.3
"""Seconds of a test that is not."""


def recorded(path: Path = TABLE) -> dict[str, float]:
    """Seconds of tests by their names."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {test: float(seconds) for seconds, test in (line.split(maxsplit=1) for line in lines)}


def merged(old: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """The table after a run: what ran has its new seconds, what did not run keeps those it had."""
    both = {**old, **found}
    return {test: both[test] for test in sorted(both) if both[test] >= LEAST}


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """A line a test; whole seconds, so that the next run changes few of them."""
    path.write_text("".join(f"{value:4.0f} {test}\n" for test, value in seconds.items()))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skirl")
    group.addoption("--record-seconds", action="store_true", help="write how long tests took to tests/seconds.txt")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--record-seconds"):
        old = {test: n for test, n in recorded().items() if (config.rootpath / test.partition("::")[0]).is_file()}
        found: dict[str, float] = defaultdict(float)
        for report in (*terminalreporter.stats.get("", ()), *terminalreporter.stats.get("passed", ())):
            found[report.nodeid] += report.duration  # with the fixtures that were made for it
        write(TABLE, merged(old, found))
        terminalreporter.write_line(f"seconds: {TABLE}")
