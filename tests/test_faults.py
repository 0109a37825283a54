"""The checker is checked: every planted fault must be caught by the suite's own checks, and nothing else may be.

A battery of a few exactness runs, their plans compared with a search of the whole window, stands for the suite: it is
made of the same helpers (tests/runs.py, tests/plans.py). A fault that it misses is a case that the suite lacks.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import skirl
from tests.faults.catalogue import AREAS
from tests.faults.zygote import COMPILED_AREAS

ROOT = Path(__file__).parents[1]
UNCLEAR = ("NOT PLANTED", "HUNG", "CRASHED", "NameError", "AttributeError", "SyntaxError", "UnboundLocalError")
"""A fault that is caught like this says nothing: it has to be written anew."""


EVERY = 16
"""`make test` plants each sixteenth fault, which takes a minute and a half of a core; a campaign plants all."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("area", AREAS)
def test_planted_faults_are_caught(area: str):
    every = 1 if settings.get_current_profile_name() == "campaign" else EVERY
    source = Path(skirl.__file__).parents[1]
    env = os.environ | {
        "NUMBA_DISABLE_JIT": str(int(area not in COMPILED_AREAS)),
        "PYTHONPATH": os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.faults.zygote", area, str(every)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    sound = outcomes.pop("")
    assert sound is None, f"the battery fails without a fault: {sound}"
    assert len(outcomes) == len(AREAS[area][::every])
    missed = [name for name, caught in outcomes.items() if caught is None]
    assert not missed, f"nothing caught: {missed}"
    unclear = {name: caught for name, caught in outcomes.items() if any(word in caught for word in UNCLEAR)}
    assert not unclear, unclear


@pytest.mark.parametrize("fault", [fault for area in AREAS.values() for fault in area], ids=lambda fault: fault.name)
def test_every_fault_can_be_planted(fault):
    """What it replaces stands once in the source, and what it puts there is Python."""
    path = Path(skirl.__file__).parent / f"{fault.module.replace('.', '/')}.py"
    source = (path if path.is_file() else path.with_suffix("") / "__init__.py").read_text()
    assert source.count(fault.old) == 1, f"{fault.old!r} stands {source.count(fault.old)} times: write this fault anew"
    ast.parse(source.replace(fault.old, fault.new))


def test_there_are_many_faults_and_none_twice():
    faults = [fault for area in AREAS.values() for fault in area]
    assert len(faults) >= 80
    assert len({fault.name for fault in faults}) == len(faults)
    assert len({(fault.module, fault.old, fault.new) for fault in faults}) == len(faults)
