"""Flags of a command: nested dataclasses, which the command line, files and `of` see as one flat list."""

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True)
class Flag:
    name: str
    type: Any
    default: Any
    """`dataclasses.MISSING` if it has to be given."""
    help: str
    group: str
    """The title that help shows it under."""


class WrongFlags(ValueError):
    """Flags that turn out to be wrong once files were read. As for any wrong flag, the command exits with code 2."""


def option(name: str) -> str:
    """Return a flag as the command line has it. A field whose name is a Python keyword ends with an underscore.

    >>> option("save_every"), option("from_")
    ('--save-every', '--from')
    """
    return f"--{name.rstrip('_').replace('_', '-')}"


class Composed:
    """A dataclass whose fields are flags, or dataclasses of flags."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this command that differ from those of its parts."""
    hidden: ClassVar[tuple[str, ...]] = ()
    """Flags that come with a part and that this command does not have."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Return the command with these flags, by name; all others have their defaults."""
        known = flags_of(cls)
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise TypeError(f"{cls.__name__} has no flag {name!r}{hint}: set some of {', '.join(known)}")
        given = {name: checked(name, value, known[name].type) for name, value in given.items()}
        return _made(cls, {**cls.defaults, **given})

    def flat(self) -> dict[str, Any]:
        return flat_of(self)


def flat_of(*parts: Any) -> dict[str, Any]:
    found = {name: value for part in parts for name, value in _values(part).items()}
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def flags_of(command: type) -> dict[str, Flag]:
    """Return the flags of a command by name. A flag of the whole replaces one with the same name in a part."""
    found: dict[str, Flag] = {}
    for flag in _own_first(command):
        if flag.name not in getattr(command, "hidden", ()):
            found.setdefault(flag.name, flag)
    for name, value in getattr(command, "defaults", {}).items():
        found[name] = dataclasses.replace(found[name], default=value)
    return found


def _own_first(owner: type) -> Iterator[Flag]:
    """Yield flags of a dataclass and its parts, in order of fields. Its own replace those of the same name in parts."""
    hints, texts, mine = get_type_hints(owner), _texts(owner), {}
    for field in dataclasses.fields(owner):
        if not dataclasses.is_dataclass(hints[field.name]):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            text = texts.get(field.name, "")
            mine[field.name] = Flag(field.name, hints[field.name], default, text, getattr(owner, "group", ""))
    for field in dataclasses.fields(owner):
        if field.name in mine:
            yield mine[field.name]
        else:
            for flag in _own_first(hints[field.name]):
                yield mine.get(flag.name, flag)


def _texts(owner: type) -> dict[str, str]:
    found = [_in_source(base.__module__).get(base.__name__, {}) for base in reversed(owner.__mro__)]
    return {name: text for of in found for name, text in of.items()}


@cache
def _in_source(module: str) -> dict[str, dict[str, str]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # it was typed in, or is built in
        return {}
    return {
        node.name: {
            ast.unparse(field.target): " ".join(str(text.value.value).split())
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _made(owner: type, values: Mapping[str, Any]) -> Any:
    hints, own = get_type_hints(owner), [field.name for field in dataclasses.fields(owner)]
    parts = [name for name in own if dataclasses.is_dataclass(hints[name])]
    inner = {name: value for name, value in values.items() if name not in own or name in parts}
    given = {name: value for name, value in values.items() if name in own and name not in parts}
    # The first parts say what to train on, which takes torch or files to check: a wrong flag of another is told at once.
    return owner(**given, **{name: _made(hints[name], inner) for name in reversed(parts)})


def _values(whole: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for field in dataclasses.fields(whole):
        value = getattr(whole, field.name)
        if dataclasses.is_dataclass(value):
            found.update(_values(value))
        else:
            found[field.name] = own[field.name] = value
    return found | own


def check_out(out: Path | str, force: bool, endings: str = "", why: str = "", folder: bool = False) -> None:
    """Raise if --out names a kind, as data is named, has another ending than these, is in a folder that does not exist, or
    exists and is not replaced by --force. folder: it is one, else it must not be."""
    if re.match(r"(parquet|csv|criteo|avazu|mind|disk):", str(out)):
        raise ValueError(f"out is {out}: name the path alone, {str(out).partition(':')[2]}")
    out = Path(out)
    if endings and out.suffix not in re.findall(r"\.\w+", endings):
        raise ValueError(f"out is {out}: name a file that ends with {endings}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"out is {str(out)!r}: its folder does not exist: make it first, or set out to another")
    if out.is_dir() and not folder:
        raise ValueError(f"out is {str(out)!r}, a folder: name a file in it")
    if out.exists() and not force:
        raise ValueError(f"out is {out}, which already exists{why}: name another file, or add --force to replace it")


def parsed(name: str, text: str, parse: Callable[[str], T], form: str) -> T:
    """Parse a flag's text. Raise a ValueError that says what to set the flag to if it cannot be parsed."""
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: set it to {form}") from None


# Values that were given in Python, or read from a file.


def check_types(flags: Any) -> None:
    """Convert values of a dataclass of flags to the types of its fields, or raise. Dataclasses themselves do not check."""
    hints = get_type_hints(type(flags))
    for field in dataclasses.fields(flags):
        value, kind = getattr(flags, field.name), hints[field.name]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, kind):  # type: ignore[arg-type]
                raise TypeError(
                    f"{field.name} is {value!r}, a {type(value).__name__}: pass each flag by its name, with "
                    f"{type(flags).__name__}.of(NAME=VALUE, ...)"
                )
            continue
        object.__setattr__(flags, field.name, checked(field.name, value, kind))


def checked(name: str, value: Any, kind: Any) -> Any:
    """Return a value as a flag of this type takes it; a whole number where text is expected becomes text."""
    given = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    try:
        return read_as(kind, given)
    except TypeError as wanted:
        if isinstance(value, int) and not isinstance(value, bool):
            with suppress(TypeError):
                return read_as(kind, str(value))
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: set it to {wanted}") from None


def read_as(kind: Any, value: Any) -> Any:
    """Return a value of JSON or TOML as a flag of this type takes it. A TypeError says what is expected."""
    for choice in choices(kind):
        if choice in (int, float) and isinstance(value, bool):
            continue
        if choice is float and isinstance(value, int):
            return float(value)
        if choice is Path and isinstance(value, str):
            return Path(value)
        if get_origin(choice) is tuple and isinstance(value, list):
            with suppress(TypeError):
                return tuple(read_as(get_args(choice)[0], item) for item in value)
            continue
        if get_origin(choice) is Literal:
            if any(value == option and type(value) is type(option) for option in get_args(choice)):
                return value
        elif get_origin(choice) is None and isinstance(value, choice):
            return value
    raise TypeError(expected(kind))


def choices(kind: Any) -> list[Any]:
    if get_origin(kind) in (Union, types.UnionType):
        return [choice for one in get_args(kind) for choice in choices(one)]
    return [kind]


def read_text(kind: Any, text: str) -> Any:
    """Return a word of a command line as a flag of this type takes it; if it takes a list, one item of that.

    The text of a ValueError is the known word that may have been meant, or nothing.
    """
    kinds = [get_args(choice)[0] if get_origin(choice) is tuple else choice for choice in choices(kind)]
    words = [str(word) for choice in kinds if get_origin(choice) is Literal for word in get_args(choice)]
    words += ["True", "False"] if bool in kinds else []
    for read in (str, int, float, {"True": True, "False": False}.__getitem__):
        for one in (one for one in kinds if one is not types.NoneType):
            with suppress(ValueError, TypeError, KeyError):
                return read_as(one, read(text))
    if text == "None" and types.NoneType in kinds:
        return None
    raise ValueError(*difflib.get_close_matches(text, words, n=1))


def is_list(kind: Any) -> bool:
    return any(get_origin(choice) is tuple for choice in choices(kind))


def expected(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    said = []
    for choice in choices(kind):
        if get_origin(choice) is Literal:
            said += [f'"{option}"' for option in get_args(choice)]
        elif get_origin(choice) is tuple:
            said.append(f"a list, each {expected(get_args(choice)[0])}")
        elif choice is not types.NoneType:
            said.append(words[choice])
    return " or ".join([", ".join(said[:-1]), said[-1]]) if len(said) > 1 else said[0]
