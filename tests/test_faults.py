"""Check the checker: the suite's own checks must catch every planted fault, and nothing else.

A battery of a few exactness runs, with plans compared to a search of the whole window, stands for the suite: it uses
the same helpers (tests/runs.py, tests/plans.py). A fault that it misses is a case that the suite lacks.
"""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import skirl
from tests.faults.catalogue import AREAS
from tests.faults.plant import Fault
from tests.faults.run import COMPILED_AREAS
from tests.processes import interpreter

ROOT = Path(__file__).parents[1]
UNCLEAR = ("NOT PLANTED", "HUNG", "CRASHED", "NameError", "AttributeError", "SyntaxError", "UnboundLocalError")
"""A fault caught in one of these ways proves nothing: it has to be rewritten."""


EVERY = 32
"""`make test` plants one fault in EVERY, a campaign all."""

FIRST = {"disk": 3, "frozen": 4}
"""Where `make test` begins to count, by area. Faults of a store that need many crashes to show are left to the other two."""


CORE = ("oracle", "moves", "training", "disk", "frozen", "checkpoints", "trainers")
"""Areas of which `make test` plants some faults; a campaign plants those of all."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("area", [*CORE, *(pytest.param(a, marks=pytest.mark.slow) for a in AREAS if a not in CORE)])
def test_planted_faults_are_caught(area: str):
    every = 1 if settings.get_current_profile_name() == "campaign" else EVERY
    first = 0 if every == 1 else FIRST.get(area, 0)
    env = os.environ | {"NUMBA_DISABLE_JIT": str(int(area not in COMPILED_AREAS))}
    code = "from tests.faults.run import main; main()"
    done = interpreter(code, area, str(every), str(first), cwd=ROOT, env=env, timeout=800)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    sound = outcomes.pop("")
    assert sound is None, f"the battery fails without a fault: {sound}"
    assert len(outcomes) == len(AREAS[area][first::every])
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
    parsed = ast.parse(source)
    for fault in (fault for fault in FAULTS if fault.module == module):
        planted = fault.plant(source)
        assert not alike(planted, parsed), f"{fault.name}: it changes nothing"
        compile(planted, f"{module} with {fault.name!r}", "exec")


def alike(one: Any, other: Any) -> bool:
    """Return whether two trees have the same nodes, wherever they are in a file."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if not isinstance(one, ast.AST):
        return one == other
    return all(alike(getattr(one, name, None), getattr(other, name, None)) for name in one._fields)


def test_trees_that_differ_anywhere_are_not_alike():
    same = [ast.parse(text) for text in ("def f(a):\n    return a + 1", "def f(a):\n\n    return (a+1)")]
    assert alike(*same)
    for text in (
        "def f(a):\n    return a + 2",
        "def f(a):\n    return a - 1",
        "def f(a=1):\n    return a + 1",
        "a = 1; a",
    ):
        assert not alike(same[0], ast.parse(text))


MANY = 371
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
            move(self.array, rows,
                 1, fast=True)
        else:
            self.count = 1
        for row in rows:
            a = self.array[..., 0]
            b = 2
            c = 3

def give(rows):
    self.count = 2
    return rows
"""


PLANTED = {
    "layout and comments do not matter": ("Cache.put", "len(rows)>1", "len(rows) > 2", "len(rows) > 1", "len(rows) > 2"),
    "a statement is removed": ("Cache", "self.count += len(rows)", "", "self.count += len(rows)", ""),
    "a block is not left empty": ("Cache", "self.count = 1", "", "self.count = 1", "pass"),
    "the whole module": ("", "return rows", "return None", "return rows", "return None"),
    "a name that is set": ("give", "self.count", "self.other", "self.count = 2", "self.other = 2"),
    "arguments that stay": ("Cache", "move(self.array, ..., fast=True)", "move(None, ..., fast=True)",
                            "move(self.array, rows", "move(None, rows"),
    "dots that are Python's own": ("Cache", "self.array[..., 0]", "self.array[..., 1]", "[..., 0]", "[..., 1]"),
    "a head": ("Cache", "for row in rows:\n    ...", "for row in rows[1:]:\n    ...", "in rows:", "in rows[1:]:"),
    "branches that stay": ("Cache", "if len(rows) > 1:\n ...\nelse:\n ...", "if True:\n ...\nelse:\n ...",
                           "if len(rows) > 1:", "if True:"),
    "statements that stay": ("Cache", "for row in rows:\n ...\n b = 2\n ...", "for row in rows:\n ...\n b = 4\n ...",
                             "b = 2", "b = 4"),
    "statements beside each other": ("Cache", "b = 2; c = 3", "b = 3; c = 2", "b = 2\n            c = 3", "b = 3;c = 2"),
    "text": (None, "fast=True)\n", "fast=False)\n", "fast=True", "fast=False"),
}  # fmt: skip


@pytest.mark.parametrize("where, old, new, gone, come", PLANTED.values(), ids=PLANTED)
def test_a_fault_is_found_as_parsed_python(where: str | None, old: str, new: str, gone: str, come: str):
    planted = Fault("", "m" if where is None else f"m:{where}", old, new).plant(SOURCE)
    plain = ast.unparse(ast.parse(SOURCE))
    assert plain.count(gone) == 1 or not gone
    assert ast.unparse(planted) == ast.unparse(ast.parse(plain.replace(gone, come, 1) if gone else plain + come))


@pytest.mark.parametrize(
    "where, old",
    [
        ("m:Cache", "self.count"),  # occurs twice
        ("m:Cache", "self.count = 2"),  # is elsewhere
        ("m:Cache", "rows > 1"),  # is in the text, but is not an expression
        ("m:Cache", "for row in rows:\n    b = 2"),  # only part of what is there
        ("m:put.count", "rows"),
        ("m", "rows"),
    ],
)
def test_a_fault_that_does_not_stand_once_is_refused(where: str, old: str):
    with pytest.raises(LookupError, match="write this fault anew"):
        Fault("", where, old, "None").plant(SOURCE)
