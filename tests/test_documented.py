"""Every argument of every public class, function and method is named in its docstring, as "- `name`: what it is".

A field of a dataclass may have its own docstring instead, as flags do. A module says in three lines what it is for.
"""

import ast
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import skirl
from tests.test_names import NAMES

NOT_CALLED_BY_USERS = {
    "Lookahead",  # made by skirl.lookahead, which says what its arguments are
    "Pooled", "Unpooled",  # made by a collection
    "CheckpointError", "DiskError", "DiskFull",  # exceptions take a message
    "Embeddings", "Source",  # protocols
    "Distinct",  # made by a lookup, and each field has its own line
    "Windowed",  # the same
    "MODELS",  # a dict
}  # fmt: skip

PUBLIC = [(module, name) for module, names in NAMES.items() for name in names]


def named(docstring: str | None) -> set[str]:
    """Return the names in lines such as "- `rows`: how many", and "- `input`, `offsets`: ids".

    >>> sorted(named('''- `a`: one
    ...     - `b`, `c`: two'''))
    ['a', 'b', 'c']
    """
    heads = re.findall(r"^\s*- ((?:`\w+`(?:, )?)+):", docstring or "", re.MULTILINE)
    return {name for head in heads for name in re.findall(r"\w+", head)}


def fields_with_a_line(kind: type) -> set[str]:
    """Return the fields of a dataclass and its bases that are followed by a docstring."""
    found = set()
    for base in kind.__mro__[:-1]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:]):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(field.target, ast.Name)
                found.add(field.target.id)
    return found


def undocumented(public: Any) -> set[str]:
    """Return the arguments that neither the docstring nor, for a class, that of `__init__` names."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {p.name for p in inspect.signature(public).parameters.values() if p.kind not in skipped} - {"self", "_"}
    known = named(public.__doc__)
    if same := re.search(r"The arguments are those of `(\w+)`", public.__doc__ or ""):
        known |= named(getattr(skirl, same[1]).__doc__)
    if inspect.isclass(public):
        known |= named(public.__init__.__doc__)
        if is_dataclass(public):
            known |= fields_with_a_line(public)
    return wanted - known


def own_methods(kind: type) -> set[str]:
    """Return the public methods that skirl's own classes define, except hooks whose signature another library dictates."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith("skirl.")]
    theirs = [base for base in kind.__mro__ if base not in ours]
    found = {name for base in ours for name, what in vars(base).items() if _is_method(what) and name[0] != "_"}
    return {name for name in found if name == "forward" or not any(hasattr(base, name) for base in theirs)}


def _is_method(what: Any) -> bool:
    return inspect.isfunction(what) or isinstance(what, classmethod | staticmethod)


def undocumented_of(kind: type, method: str) -> set[str]:
    """Return the arguments of a method that neither its docstring nor a base class's names."""
    docs = [getattr(base, method).__doc__ for base in kind.__mro__ if method in vars(base)]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(getattr(kind, method)).parameters.values()
    return {p.name for p in parameters if p.kind not in kinds} - {"self", "_"} - {n for doc in docs for n in named(doc)}


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_argument_of_a_method_is_documented(module: str, name: str):
    kind = getattr(import_module(module), name)
    if inspect.isclass(kind):
        missing = {method: found for method in own_methods(kind) if (found := undocumented_of(kind, method))}
        assert not missing, f"methods of {name} do not say what these are: {missing}"


@pytest.mark.parametrize(("module", "name"), [at for at in PUBLIC if at[1] not in NOT_CALLED_BY_USERS])
def test_every_argument_is_documented(module: str, name: str):
    missing = undocumented(getattr(import_module(module), name))
    assert not missing, (
        f"{name} does not say what {', '.join(sorted(missing))} is: write - `name`: ... under **Arguments**"
    )


LINES = 3
"""Most lines of a module's docstring. Decisions go to docs/design.md, forms of data to the class that has them."""


def test_every_module_says_briefly_what_it_is_for():
    house = Path(skirl.__file__).parent
    docs = {str(p.relative_to(house)): ast.get_docstring(ast.parse(p.read_text())) for p in house.rglob("*.py")}
    assert sorted(name for name, doc in docs.items() if doc is None) == []
    long = {name: n for name, doc in docs.items() if (n := len((doc or "").splitlines())) > LINES}
    assert not long, f"docstrings of modules have more than {LINES} lines: {long}"


def test_names_that_are_left_out_are_public():
    assert {name for _, name in PUBLIC} >= NOT_CALLED_BY_USERS
