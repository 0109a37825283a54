"""Check the checker: the suite's own checks must catch every planted fault, and nothing else.

A battery of a few exactness runs, with plans compared to a search of the whole window, stands for the suite: it uses
the same helpers (tests/runs.py, tests/oracle/brute.py). A fault that it misses is a case that the suite lacks.
"""

import ast
import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

import skirl
from tests.faults.catalogue import AREAS
from tests.faults.run import COMPILED
from tests.processes import interpreter

ROOT = Path(__file__).parents[1]
UNCLEAR = ("NOT PLANTED", "HUNG", "CRASHED", "NameError", "AttributeError", "SyntaxError", "UnboundLocalError")
"""A fault caught in one of these ways proves nothing: it has to be rewritten."""

QUICK = {
    "oracle": ["one slot is given to two rows", "every row is taken for seen"],
}
"""What `make test` plants, none of which needs a race. A campaign plants all faults, and runs the battery without one."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("area", [*QUICK, *(pytest.param(a, marks=pytest.mark.slow) for a in AREAS if a not in QUICK)])
def test_planted_faults_are_caught(area: str):
    names = [] if settings.get_current_profile_name() == "campaign" else QUICK.get(area, [])
    env = os.environ | {"NUMBA_DISABLE_JIT": str(int(area not in COMPILED))}
    done = interpreter("from tests.faults.run import main; main()", area, *names, cwd=ROOT, env=env, timeout=3500)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    sound = outcomes.pop("", None)
    assert sound is None, f"the battery fails without a fault: {sound}"
    assert list(outcomes) == [fault.name for fault in AREAS[area] if not names or fault.name in names]
    missed = [name for name, caught in outcomes.items() if caught is None]
    assert not missed, f"nothing caught: {missed}"
    unclear = {name: caught for name, caught in outcomes.items() if any(word in caught for word in UNCLEAR)}
    assert not unclear, unclear


FAULTS = [fault for area in AREAS.values() for fault in area]


@pytest.mark.parametrize("module", sorted({fault.module for fault in FAULTS}))
def test_every_fault_can_be_planted(module: str):
    """The code that it replaces occurs once in the source, and the replacement is valid Python and different."""
    path = Path(skirl.__file__).parent / f"{module.replace('.', '/')}.py"
    source = (path if path.is_file() else path.with_suffix("") / "__init__.py").read_text()
    plain = ast.unparse(ast.parse(source))
    for fault in (fault for fault in FAULTS if fault.module == module):
        planted = fault.plant(source)
        assert ast.unparse(planted) != plain, f"{fault.name}: it changes nothing"
        compile(planted, f"{module} with {fault.name!r}", "exec")


MANY = 133
"""The current number of faults, so that the test notices if one is removed. Raise it when you add faults."""


def test_there_are_many_faults_and_none_twice():
    assert len(FAULTS) >= MANY
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.where, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
