"""Part exact of sweep.py: random sweeps, each variant of which has to leave what it leaves alone, and planted faults."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

import common  # noqa: F401 which puts tests on the path
from tests.sweep.runs import check
from tests.sweep.test_sweep import cases_of


def exact(cases: int) -> dict[str, Any]:
    """Return how many of these random sweeps differ, and how many of the faults in tests/faults are caught."""
    wrong = list[str]()

    @settings(
        max_examples=cases, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(cases_of(Path()))
    def each(case: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(replace(case, folder=Path(folder)))
            except AssertionError as error:
                wrong.append(str(error)[:200])

    each()
    planted = subprocess.run(
        [sys.executable, "-m", "tests.faults.run", "sweep"], capture_output=True, text=True, check=True
    )
    outcomes = json.loads(planted.stdout)
    unplanted = outcomes.pop("")
    return {
        "cases": cases, "differences": len(wrong), "first": wrong[:1], "faults": len(outcomes),
        "caught": sum(of is not None for of in outcomes.values()),
        "failed": unplanted or (f"{len(wrong)} differences" if wrong else None),
    }  # fmt: skip
