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
from skirl.tools.flags import _texts
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


NO_VALUE = (None, True, False, (), "", float("inf"))
"""Defaults that are told by what happens without the argument."""
WITHOUT = r"\b(False|True|None|default|if|unless|without|otherwise|empty|no|all|as (for|in|given)|may be left)\b|as `"
ELSEWHERE = r"\bas (for|in|given)\b|\bas `|default"


def texts(docstring: str | None) -> dict[str, str]:
    """Return what a docstring says of each argument.

    >>> texts('- `a`, `b`: 3, as\\n  in torch.')
    {'a': '3, as in torch.', 'b': '3, as in torch.'}
    """
    found = re.findall(r"^([ ]*)- ((?:`\w+`(?:, )?)+): (.*(?:\n\1  .*)*)", docstring or "", re.MULTILINE)
    return {name: " ".join(text.split()) for _, names, text in found for name in re.findall(r"\w+", names)}


def spelled(default: Any) -> set[str]:
    """Return how a docstring may write a default."""
    numbers = {0: "zero", 1: "one", 2: "two", 3: "three"}
    found = {str(default).removeprefix("torch."), re.sub("e([-+])0", r"e\1", str(default)).removesuffix(".0")}
    if isinstance(default, int | float):
        found |= {f"{default:,}", numbers.get(int(default), "")} - {""}
    if isinstance(default, tuple):
        found.add(f"of {default[0]}")
    return found


def says(text: str, default: Any) -> bool:
    """Return whether the description of an argument tells its default, or where else it is told.

    >>> says("the rate; 0.01 as in torch", 0.01), says("the rate", 0.01), says("off if not given", None)
    (True, False, True)
    """
    if any(default is of or (type(default) is type(of) and default == of) for of in NO_VALUE):
        return bool(re.search(WITHOUT, text))
    written = "|".join(rf"(?<![\w.]){re.escape(word)}(?![\w]|\.\d)" for word in spelled(default))
    return bool(re.search(f"{written}|{ELSEWHERE}", text, re.IGNORECASE))


@pytest.mark.parametrize(("module", "name"), [at for at in PUBLIC if at[1] not in {*NOT_CALLED_BY_USERS, "DataFlags"}])
def test_every_default_is_told_where_its_argument_is(module: str, name: str):
    """For flags, `--help` shows it."""
    public = getattr(import_module(module), name)
    inner = sorted(own_methods(public)) if inspect.isclass(public) else []
    for at in (None, *inner):
        call = public if at is None else getattr(public, at)
        of = public.__mro__[::-1] if inspect.isclass(public) else [public]
        owners = of if at is None else [getattr(base, at) for base in of if at in vars(base)]
        told: dict[str, str] = {}
        for owner in owners:
            told |= _texts(owner) if is_dataclass(owner) and inspect.isclass(owner) else {}
            told |= texts(owner.__doc__) | (texts(owner.__init__.__doc__) if at is None else {})
        if same := re.search(r"The arguments are those of `(\w+)`", public.__doc__ or ""):
            told = texts(getattr(skirl, same[1]).__doc__) | told
        for argument in inspect.signature(call).parameters.values():
            default = argument.default
            if default is argument.empty or argument.name[0] == "_" or callable(default) or "factory" in repr(default):
                continue
            assert says(told.get(argument.name, ""), default), f"{name}.{at}: say why {argument.name} is {default!r}"


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
