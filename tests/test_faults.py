"""The checker is checked: every planted fault must be caught by the suite's own checks, and nothing else may be.

A battery of a few exactness runs, their plans compared with a search of the whole window, stands for the suite: it is
made of the same helpers (tests/runs.py, tests/plans.py). A fault that it misses is a case that the suite lacks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import skirl
from tests.faults.catalogue import AREAS
from tests.faults.zygote import COMPILED_AREAS

ROOT = Path(__file__).parents[1]
UNCLEAR = ("NOT PLANTED", "HUNG", "CRASHED", "NameError", "AttributeError", "SyntaxError", "UnboundLocalError")
"""A fault that is caught like this says nothing: it has to be written anew."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("area", AREAS)
def test_every_planted_fault_is_caught(area: str):
    source = Path(skirl.__file__).parents[1]
    env = os.environ | {
        "NUMBA_DISABLE_JIT": str(int(area not in COMPILED_AREAS)),
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.faults.zygote", area]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    sound = outcomes.pop("")
    assert sound is None, f"the battery fails without a fault: {sound}"
    assert len(outcomes) == len(AREAS[area])
    missed = [name for name, caught in outcomes.items() if caught is None]
    assert not missed, f"nothing caught: {missed}"
    unclear = {name: caught for name, caught in outcomes.items() if any(word in caught for word in UNCLEAR)}
    assert not unclear, unclear


def test_there_are_many_faults_and_none_twice():
    faults = [fault for area in AREAS.values() for fault in area]
    assert len(faults) >= 80
    assert len({fault.name for fault in faults}) == len(faults)
    assert len({(fault.module, fault.old, fault.new) for fault in faults}) == len(faults)
