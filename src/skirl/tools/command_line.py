"""Reading the flags of a command line, showing them as help by groups, and saying what is wrong with them."""

import difflib
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, field, make_dataclass
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, get_origin

from skirl.tools.flags import Flag, expected, is_list, metavar, option, read_text


def read_flags(
    prog: str,
    text: str,
    flags: Mapping[str, Flag],
    args: Sequence[str],
    *,
    common: Collection[str] = (),
    usual: Collection[str] = (),
    hidden: Collection[str] = (),
    positional: str | None = None,
    example: str | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the value of each flag by name. Exit with code 2 if the command line is wrong.

    usual: the flags that `--help` shows besides the common ones, all if empty; `--help all` shows all.
    """
    args, everything = [arg for arg, before in zip(args, ["", *args]) if (before, arg) != ("--help", "all")], list(args)
    if usual and len(args) == len(everything) and _asks(args):
        text += f" `{prog} --help all` lists all flags; these are the ones that are used most."
        hidden = {*hidden, *(n for n in flags if flags[n].group and n not in common and n not in usual)}
    for arg in args:
        name = arg.removeprefix("--").partition("=")[0]
        if arg.startswith("--") and name in elsewhere and name not in flags:
            _refuse(prog, f"there is no flag {option(name)}: {elsewhere[name]}")
    if not _asks(args):
        _refuse_wrong(prog, flags, args)
    import tyro  # 0.1 s that an overview does not need

    if positional is not None:
        text += f" {prog} {positional.upper()} is the same as {prog} --{positional} {positional.upper()}."
    needed = _needed(flags, args, hidden)
    first = [name for name in common if name in flags] + [n for n in flags if n not in common and not flags[n].group]
    order = [flags[name] for name in dict.fromkeys([*first, *flags]) if name in needed]
    no_pairs = (tyro.conf.FlagCreatePairsOff,)  # --json, and no --no-json
    found, unknown = tyro.cli(
        _declared(order, first), prog=prog, args=args, description=text, config=no_pairs, return_unknown_args=True
    )
    values = {name: flag.default for name, flag in flags.items()}
    for flag in order:
        value = getattr(found if flag.name in first else getattr(found, f"group_{flag.group}"), flag.name)
        if flag.type is not bool or value:  # False: it was not given
            values[flag.name] = value
    if positional is not None and len(unknown) == 1 and not unknown[0].startswith("-"):
        if any(arg.partition("=")[0] == f"--{positional}" for arg in args):
            _refuse(prog, f"{positional} is given twice, with its name and without it: leave one of them out")
        values[positional] = unknown.pop()
    elif not unknown and positional and example and positional not in dict(_given(flags, args)[0]):
        _refuse(prog, f"say which {positional}, for instance `{example}`; {prog} --help lists what else can be set")
    if unknown:
        _refuse_unknown(prog, flags, unknown)
    return values


def _declared(flags: Sequence[Flag], first: Collection[str]) -> type:
    """Return a dataclass by which tyro reads these flags: those in `first` directly, others in one for each group."""
    from tyro.conf import arg

    own, groups = [], dict[str, list[Any]]()
    for flag in flags:
        (own if flag.name in first else groups.setdefault(flag.group, [])).append(_field(flag))
    for group, fields in groups.items():
        part = make_dataclass(group, fields, kw_only=True)
        own.append((f"group_{group}", Annotated[part, arg(help="", name=group)], field()))
    return make_dataclass("Flags", own, kw_only=True)


def _field(flag: Flag) -> tuple[str, Any, Any]:
    """Return a flag as a field; one that takes no value is False until it is given, whatever its default."""
    from tyro.conf import arg

    name, default = flag.name, False if flag.type is bool else flag.default
    shown = name.upper() if get_origin(flag.type) is Annotated else metavar(flag.type)  # a word without a flag
    hint = "" if flag.default in (None, "", ()) or flag.default is False else None  # nobody types None
    if flag.type is bool:
        shown, hint = None, "(set)" if flag.default is True else ""
    own = name.removesuffix("_") if name.endswith("_") else None
    told = arg(name=own, help=flag.help, prefix_name=False, metavar=shown, help_behavior_hint=hint)
    return name, Annotated[flag.type, told], field() if default is MISSING else field(default=default)


def _refuse_unknown(prog: str, flags: Mapping[str, Flag], unknown: Sequence[str]) -> NoReturn:
    """Exit because of words that are no flag, or that follow none."""
    wrong = next((arg for arg in unknown if arg.startswith("-")), None)
    names = [option(name).removeprefix("--") for name in flags]  # dashes would make all of them alike
    near = difflib.get_close_matches((wrong or unknown[0]).lstrip("-").replace("_", "-"), names, n=1)
    hint = f"did you mean --{near[0]}?" if near else f"{prog} --help lists them"
    said = f"there is no flag {wrong}: {hint}"
    _refuse(prog, said if wrong else f"{unknown[0]!r} is not the value of a flag: write a flag before it ({hint})")


def joined(flags: Mapping[str, Flag], args: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line in which repeated flags of these names stand once, at its end, with all of their words.

    >>> flags = {"vary": Flag("vary", tuple[str, ...], (), "", ""), "lr": Flag("lr", float, 1.0, "", "")}
    >>> joined(flags, ["--vary", "a=1,2", "--lr", "3", "--vary=b=4", "c=5"], ["vary"])
    ['--lr', '3', 'c=5', '--vary', 'a=1,2', 'b=4']
    """
    rest, words, taking = [], dict[str, list[str]](), None
    for arg in args:
        name, equals, value = arg.removeprefix("--").partition("=")
        if arg.startswith("--") and name in names and name in flags:
            words.setdefault(name, []).extend([value] if equals else [])
            taking = None if equals else name
        elif arg.startswith("--") or taking is None:
            rest.append(arg)
            taking = None
        else:
            words[taking].append(arg)
    return rest + [word for name, several in words.items() for word in (f"--{name}", *several)]


def _asks(args: Sequence[str]) -> bool:
    """Return whether a command line asks for help, or for a shell's completion."""
    return any(arg in ("-h", "--help") or arg.startswith("--tyro-") for arg in args)


def _needed(flags: Mapping[str, Flag], args: Sequence[str], hidden: Collection[str]) -> set[str]:
    """Return the flags that tyro has to know: those given or shown, and positional ones. Others would take it 0.1 s."""
    given = dict(_given(flags, args)[0])
    shown = {n for n in flags if n not in hidden} if _asks(args) else set()
    return {n for n, flag in flags.items() if n in shown or n in given or get_origin(flag.type) is Annotated}


def _refuse(prog: str, why: str) -> NoReturn:
    print(f"{prog}: {why}", file=sys.stderr)
    raise SystemExit(2)


def in_flags(sentence: str, names: Collection[str]) -> str:
    """Turn a sentence about arguments into one about flags. Leave words that only look like the name of one.

    >>> print(in_flags("save_every and keep need a folder: set save", ["save", "save_every", "keep"]))
    --save-every and --keep need a folder: set --save
    >>> print(in_flags("cache '10%' is 2 rows, batch 0 needs 3: set cache to 3", ["batch", "cache", "rows"]))
    --cache '10%' is 2 rows, batch 0 needs 3: set --cache to 3
    """
    if not names:
        return sentence
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    long = "|".join(sorted((re.escape(name) for name in names if "_" in name), key=len, reverse=True))

    def flagged(found: re.Match[str]) -> str:
        return re.sub(rf"\b(?<![-.])({one})\b", lambda name: option(name[0]), found[0])

    subject = rf"^(?:{one})(?:, (?:{one}))*(?: and (?:{one}))?(?= (?:is|are|needs?|counts|has) | ['\d])"
    sentence = re.sub(subject, flagged, sentence)
    sentence = re.sub(
        rf"\b(?:[Ss]et|leave|make|raise) (?:{one})(?: (?:and|or) (?:{one}))?\b(?![-=.(_])", flagged, sentence
    )
    sentence = re.sub(rf"\b(?:and|but) (?:{one})(?= is | ')", flagged, sentence)
    if long:
        sentence = re.sub(rf"(?<![-\w.='\"`/(])({long})(?![-\w.=(/])", lambda name: option(name[0]), sentence)
    return sentence


def _given(flags: Mapping[str, Flag], args: Sequence[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the flags of a command line, each with its values, and the words that follow no flag."""
    given: list[tuple[str, list[str]]] = []
    words: list[str] = []
    taking: Any = None
    for arg in args:
        written, equals, value = arg.partition("=")
        name = _named(flags, arg)
        if _is_flag(arg):
            kind = flags[name].type if written.startswith("--") and name in flags else None
            if kind is not None:
                given.append((name, [value] if equals else []))
            taking = None if kind is None or kind is bool or equals else kind
        elif taking is not None:
            given[-1][1].append(arg)
            taking = taking if is_list(taking) else None
        else:
            words.append(arg)
    return given, words


def _is_flag(arg: str) -> bool:
    """Return whether a word of a command line is a flag, and not a value such as -1."""
    return arg.startswith("-") and not re.fullmatch(r"-(\d.*|\.\d.*|inf|nan|)", arg)


def _named(flags: Mapping[str, Flag], arg: str) -> str:
    """Return the name of the flag that a word such as `--save-every=5` sets, if it is one."""
    name = arg.partition("=")[0].removeprefix("--").replace("-", "_")
    return f"{name}_" if f"{name}_" in flags else name


def _refuse_wrong(prog: str, flags: Mapping[str, Flag], args: Sequence[str]) -> None:
    """Exit if a flag is unknown, has a wrong value, has none, or is missing. Unlike tyro's, the errors are sentences."""
    given, words = _given(flags, args)
    unknown = [arg for arg in args if _is_flag(arg) and not (arg.startswith("--") and _named(flags, arg) in flags)]
    if unknown:
        _refuse_unknown(prog, flags, [arg.partition("=")[0] for arg in unknown])
    for name, values in given:
        kind = flags[name].type
        if kind is bool and values:
            _refuse(prog, f"{option(name)} takes no value: write {option(name)} alone, or leave it out")
        if kind is not bool and not values:
            _refuse(prog, f"{option(name)} has no value: set it to {expected(kind)}")
        for text in values:
            try:
                read_text(kind, text)
            except ValueError as near:
                hint = f" (did you mean {near}?)" if str(near) else ""
                wanted = expected(kind).replace("true or false", "True or False")  # as the command line has them
                _refuse(prog, f"{option(name)} is {text!r}{hint}: set it to {wanted}")
    missing = [name for name, flag in flags.items() if flag.default is MISSING and name not in dict(given)]
    alone = [name for name in missing if get_origin(flags[name].type) is Annotated]
    for name in alone[len(words) :]:
        _refuse(
            prog, f"no {name} is named: write {prog} {' '.join(map(str.upper, alone))} ({_begun(flags[name].help)})"
        )
    for name in missing:
        if name not in alone:
            typed = f"{option(name)} {metavar(flags[name].type)}"
            _refuse(prog, f"{option(name)} is missing: add {typed} ({_begun(flags[name].help)})")


def _begun(sentence: str) -> str:
    """Return a sentence as part of another one."""
    return f"{sentence[:1].lower()}{sentence[1:].removesuffix('.')}"
