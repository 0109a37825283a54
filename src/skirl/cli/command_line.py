"""Reads a command's flags from a command line and a file, and shows help. What is wrong is one sentence."""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, NoReturn

from skirl.tools.flags import Composed, Flag, WrongFlags, expected, flags_of, is_list, option, read_as, read_text

LEFT = ("sweep.json", "config.json")
"""Files in which sweep and train leave their flags."""
ALIASES = {
    "learning-rate": "lr", "batch-size": "batch", "embedding-dim": "dim", "validation": "valid", "test": "valid",
    "checkpoint": "save", "tensorboard": "run", "log-dir": "run", "output": "out",
}  # fmt: skip
"""Names that others give to flags."""
COMMON = frozenset({
    "data", "schema", "rows", "vocab", "valid", "epochs", "batch", "steps", "seed", "model", "dim", "optimizer", "lr",
    "dense_lr", "schedule", "warmup", "cache", "store", "device", "threads", "eval_every", "patience", "save", "resume",
    "save_every", "keep_best", "from_", "run", "json", "rungs", "keep", "config",
})  # fmt: skip
"""Flags that help shows beside a command's own, if it is not asked for all."""

CONFIG = Flag(
    name="config",
    type=Path | None,
    default=None,
    help="Take flags from a TOML file, or from the folder (--run) of a run or a sweep to repeat it, but not where it wrote. "
    "Other flags win over it.",
    group="",
)


def read_flags(command: str, about: str, kind: Any, args: Sequence[str]) -> dict[str, Any]:
    """Return the value of each flag by name: that of the command line, of the file that --config names, or the default.
    In `kind`, the class of the command, `repeated` may be given several times."""
    own, prog, positional = flags_of(kind), f"skirl {command}", positional_of(kind)
    flags = own | {CONFIG.name: CONFIG} if issubclass(kind, Composed) else own
    if any(arg in ("-h", "--help") for arg in args):
        _show_help(prog, about, kind, flags, "all" in args)
    given, words = _split(prog, kind, flags, args)
    values = {name: _value(kind, flags[name], texts) for name, texts in given.items()}
    alone = [name for name in positional if name not in given]
    if words[len(alone) :]:
        if (twice := [name for name in positional if name in given]) and words[0] == args[0]:
            raise WrongFlags(f"{twice[0]} is given twice, with its name and without it: leave one of them out")
        raise _unknown(prog, flags, words[len(alone)])
    values |= {name: _value(kind, flags[name], [word]) for name, word in zip(alone, words)}
    if (path := values.pop(CONFIG.name, None)) is not None:
        from skirl.cli.train import Train

        values = read_config(path, command, own, flags_of(Train), getattr(kind, "hidden", ())) | values
    for name, flag in own.items():
        if name not in values:
            _check_missing(prog, kind, flag)
    return {name: values.get(name, flag.default) for name, flag in own.items()}


def positional_of(kind: Any) -> tuple[str, ...]:
    """Return the flags that may be given without their names: those that the command says, or the first that it needs."""
    needed = (
        ["data"] if issubclass(kind, Composed) else [n for n, of in flags_of(kind).items() if of.default is MISSING]
    )
    return getattr(kind, "positional", tuple(needed[:1]))


def _check_missing(prog: str, kind: Any, flag: Flag) -> None:
    first = flag.name in positional_of(kind)
    if first and (example := getattr(kind, "example", None)):
        raise WrongFlags(f"say which {flag.name}, for instance `{example}`; {prog} --help lists what else can be set")
    if flag.default is MISSING:
        typed, what = flag.name.upper() if first else option(flag.name), flag.help.removesuffix(".")
        raise WrongFlags(f"{typed} is missing: set it to {expected(flag.type)} ({what[:1].lower()}{what[1:]})")


def _split(
    prog: str, kind: Any, flags: Mapping[str, Flag], args: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the words that follow each flag, and those that follow none."""
    given, words, taking, last = dict[str, list[str]](), list[str](), "", ""
    for arg in args:
        typed, equals, value = arg.partition("=")
        if not arg.startswith("-") or re.fullmatch(r"-(\d.*|\.\d.*|inf|nan|)", arg):
            if last and is_list(flags[last].type) and arg.isdecimal():
                raise WrongFlags(f"{option(last)} takes one word: write {option(last)} {given[last][-1]},{arg}")
            (given[taking] if taking else words).append(arg)
            taking, last = "", taking
            continue
        name = typed.removeprefix("--").replace("-", "_")
        name = f"{name}_" if f"{name}_" in flags else name
        if not typed.startswith("--") or name not in flags:
            raise _unknown(prog, flags, typed)
        if name in given and name == CONFIG.name:
            raise WrongFlags("--config is given twice: put all flags into one file, and name that")
        before = given.pop(name, []) if name in getattr(kind, "repeated", ()) else []
        given[name] = [*before, value] if equals else before
        taking, last = "" if equals or flags[name].type is bool else name, ""
    return given, words


def _value(command: Any, flag: Flag, texts: Sequence[str]) -> Any:
    typed, kind, values = option(flag.name), flag.type, []
    repeated = getattr(command, "repeated", ())
    if is_list(kind) and flag.name not in repeated:
        texts = [word for text in texts for word in text.split(",")]
    if kind is bool:
        if texts:
            raise WrongFlags(f"{typed} takes no value: write {typed} alone, or leave it out")
        return True
    if not texts:
        raise WrongFlags(f"{typed} has no value: set it to {expected(kind)}")
    for text in texts:
        try:
            values.append(read_text(kind, text))
        except ValueError as near:
            hint = f" (did you mean {near}?)" if str(near) else ""
            varied = "vary" in repeated and "," in text
            vary = f", or vary it: --vary {typed.removeprefix('--')}={text}" if varied else ""
            raise WrongFlags(f"{typed} is {text!r}{hint}: set it to {expected(kind)}{vary}") from None
    return tuple(values) if is_list(kind) else values[0]


def _show_help(prog: str, about: str, kind: Any, flags: Mapping[str, Flag], everything: bool) -> NoReturn:
    positional, names = positional_of(kind), [*flags]
    first = COMMON.union(field.name for field in fields(kind))
    if not everything and issubclass(kind, Composed):
        names = [name for name in flags if name in first]
        about += f". `{prog} --help all` lists all flags; these are the ones that are used most."
    words = [name.upper() if flags[name].default is MISSING else f"[{name.upper()}]" for name in positional]
    shown: dict[str, list[str]] = {}
    for name in dict.fromkeys([*positional, *(n for n in names if flags[n].default is MISSING), *names]):
        flag = flags[name]
        unset = flag.default in (None, "", (), MISSING) or flag.default is False
        typed = f"{name.upper()}, or " * (name in positional)
        typed += option(name) + f" ({expected(flag.type)})" * (flag.type is not bool)
        text = _filled(flag.help + ("" if unset else f" (default: {flag.default})"), "      ")
        shown.setdefault(flag.group or "flags", []).append(f"{_filled(typed, '  ')}\n{text}")
    print("usage:", prog, *words, f"[flags]{getattr(kind, 'then', '')}\n\n" + _filled(about, ""))
    for group, texts in shown.items():
        print(f"\n{group}", *texts, sep="\n")
    raise SystemExit(0)


def _filled(text: str, indent: str) -> str:
    width = min(100, get_terminal_size().columns)
    indents: Any = {"initial_indent": indent, "subsequent_indent": indent}
    return fill(text, width, break_long_words=False, break_on_hyphens=False, **indents)


def _unknown(prog: str, flags: Mapping[str, Flag], word: str) -> WrongFlags:
    """Return the error of a word that is no flag, or that follows none."""
    from skirl.cli.train import Train

    # Without dashes, which would make all of them alike.
    names, of_train = ([option(n).removeprefix("--") for n in of] for of in (flags, flags_of(Train)))
    name = word.lstrip("-").replace("_", "-")
    name = ALIASES.get(name, name)
    if word == "--trainers" and prog == "skirl train":
        return WrongFlags(f"there is no flag {word}: use skirl launch -n 2 -- train ...")
    if word.startswith("-") and name in of_train and name not in names:
        return WrongFlags(f"there is no flag --{name}, which is one of skirl train: leave it out")
    near = [name] if name in names else difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean --{near[0]}?" if near else f"{prog} --help lists them"
    if word.startswith("-"):
        return WrongFlags(f"there is no flag {word}: {hint}")
    return WrongFlags(f"{word!r} is not the value of a flag: write a flag before it ({hint})")


def in_flags(sentence: str, names: Collection[str]) -> str:
    """Turn a sentence about arguments into one about flags. Leave words that only look like the name of one."""
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    long = "|".join(sorted((re.escape(name) for name in names if "_" in name), key=len, reverse=True)) or "(?!)"
    subject = rf"^(?:{one})(?:, (?:{one}))*(?: and (?:{one}))?(?= (?:is|are|needs?|counts|has) | '| \d+(?![\d:]))"
    object_ = rf"\b(?:[Ss]et|leave|make|raise) (?:{one})(?:, (?:{one}))*(?: (?:and|or) (?:{one}))?\b(?![-=.(_])"
    anywhere = rf"(?<![-\w.='\"`/(])(?:{long})(?![-\w.=(/])"
    for pattern in (subject, object_, rf"\b(?:and|but|or) (?:{one})(?= is | to | ')", anywhere):
        sentence = re.sub(
            pattern, lambda part: re.sub(rf"\b(?<![-.])({one})\b", lambda name: option(name[0]), part[0]), sentence
        )
    return sentence


# A file.


def read_config(
    path: Path, command: str, flags: Mapping[str, Flag], train: Mapping[str, Flag], without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the flags that a file sets: TOML, or what `train` or `sweep` left in its folder. Flags of `train` that this
    command does not have are passed over, except those `without` which it trains otherwise."""
    if path.is_dir():
        there = [path / name for name in LEFT if (path / name).is_file()]
        if not there:
            raise ValueError(f"config is {str(path)!r}, no folder of a run: name that of --run, not of --save")
        path = there[0]
    found = _parsed(path)
    left = set(found) >= {"command", "flags"}  # by a command
    if left:
        if found["command"] == "sweep" != command:
            raise ValueError(
                f"{path} is of a sweep: use `skirl sweep --config {path}`, or name the folder of a variant"
            )
        writes = {n for n, flag in train.items() if flag.group in ("save", "output")} - {"from_", "log_every"}
        # A run is not to write to the same places.
        found = {name: value for name, value in found["flags"].items() if name not in writes}
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        name = f"{name}_" if f"{name}_" in {*flags, *train} else name  # a word that Python keeps for itself
        if name in flags:
            try:
                values[name] = read_as(flags[name].type, value)
            except TypeError as wanted:
                if left and value is None:  # that command may do without it
                    continue
                raise ValueError(f"{path}: {key} is {json.dumps(value, default=str)}: set it to {wanted}") from None
        elif name in without and value not in (None, train[name].default):
            raise ValueError(f"{path}: {key} is {value!r}, which only a single run can have: leave it out")
        elif name not in train:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ValueError(f"{path}: {key} is not a flag of this command: {hint}")
    return values


def _parsed(path: Path) -> dict[str, Any]:
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        found = parse(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("flags", {}), dict):
            return found
        wrong = "there are no flags in it"
    except OSError:
        wrong = "it cannot be read"
    except (ValueError, RecursionError) as error:
        wrong = f"this is not valid {kind} ({error})"
    raise ValueError(f"{path}: {wrong}: set config to a TOML file or a config.json")
