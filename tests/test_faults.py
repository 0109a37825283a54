"""Check the checker: the suite's own checks must catch every planted fault, and nothing else.

A battery of a few exactness runs, with plans compared to a search of the whole window, stands for the suite: it uses
the same helpers (tests/runs.py, tests/plans.py). A fault that it misses is a case that the suite lacks.
"""

import ast
import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

import skirl
from tests.faults.catalogue import AREAS
from tests.faults.plant import Fault
from tests.faults.run import COMPILED
from tests.processes import interpreter

ROOT = Path(__file__).parents[1]
UNCLEAR = ("NOT PLANTED", "HUNG", "CRASHED", "NameError", "AttributeError", "SyntaxError", "UnboundLocalError")
"""A fault caught in one of these ways proves nothing: it has to be rewritten."""

QUICK = {
    "oracle": ["one slot is given to two rows", "a fetch waits for no write-back", "every row is taken for seen"],
    "disk": ["records are not synced", "the log is read in another order than it was written"],
}
"""What `make test` plants. A campaign plants all faults, and runs the battery without one."""


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


MANY = 117
"""The current number of faults, so that the test notices if one is removed. Raise it when you add faults."""


def test_there_are_many_faults_and_none_twice():
    assert len(FAULTS) >= MANY
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.where, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


SOURCE = """
class Cache:
    def put(self, rows):
        if len(rows) > 1:  # more than one
            self.count += len(
                rows)
            self.counts = 0
        else:
            self.count = 1
        return self.count

def put(rows):
    return rows
"""

PLANTED = {
    "layout and comments do not matter": ("Cache.put", "+= len(rows)", "= 1", "+= len(rows)", "= 1"),
    "several lines": ("Cache.put", "else:\n  self.count = 1", "", "\n        else:\n            self.count = 1", ""),
    "more lines": ("Cache.put", "self.count = 1", "x = 1\ny = 1", "self.count = 1", "x = 1\n            y = 1"),
    "a class": ("Cache", "return self.count", "return 0", "return self.count", "return 0"),
    "a function": ("put", "return rows", "return 0", "return rows", "return 0"),
}  # fmt: skip


@pytest.mark.parametrize("where, old, new, gone, come", PLANTED.values(), ids=PLANTED)
def test_a_fault_is_found_in_a_function(where: str, old: str, new: str, gone: str, come: str):
    planted = Fault("", f"m:{where}", old, new).plant(SOURCE)
    plain = ast.unparse(ast.parse(SOURCE))
    assert plain.count(gone) == 1
    assert ast.unparse(planted) == ast.unparse(ast.parse(plain.replace(gone, come)))


@pytest.mark.parametrize(
    "where, old",
    [
        ("Cache.put", "rows"),  # occurs twice
        ("put", "self.count = 1"),  # is elsewhere
        ("Cache.put", "self.coun"),  # only part of a name
        ("Cache.put", "count = 1"),  # only part of a dotted name
        ("Cache.get", "rows"),
    ],
)
def test_a_fault_that_does_not_stand_once_is_refused(where: str, old: str):
    with pytest.raises(LookupError, match="write this fault anew"):
        Fault("", f"m:{where}", old, "None").plant(SOURCE)
