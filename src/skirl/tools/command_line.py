"""Reads the flags of a command line, and shows them as help by groups."""

import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, field, make_dataclass
from typing import Annotated, Any, NoReturn

from skirl.tools.flags import Flag, option


def read_flags(
    prog: str,
    text: str,
    flags: Mapping[str, Flag],
    args: Sequence[str],
    *,
    common: Collection[str] = (),
    positional: str | None = None,
) -> dict[str, Any]:
    """The value of each flag by name; leaves with exit code 2 where the command line is wrong.

    **Arguments**

    - `prog`: the command, as its help and errors call it.
    - `text`: what it does.
    - `flags`: those that it has.
    - `args`: the command line.
    - `common`: flags that help shows first, in this order; those without a group follow them, all others are in groups.
    - `positional`: a flag that may be given without its name.
    """
    import tyro  # 0.1 s that an overview does not need

    first = [name for name in common if name in flags] + [n for n in flags if n not in common and not flags[n].group]
    groups: dict[str, list[str]] = {}
    for name in (name for name in flags if name not in first):
        groups.setdefault(flags[name].group, []).append(name)

    def declared(name: str) -> tuple[str, Any, Any]:
        flag = flags[name]
        own = name.removesuffix("_") if name.endswith("_") else None
        kind = Annotated[flag.type, tyro.conf.arg(name=own, help=flag.help, prefix_name=False)]
        return name, kind, field() if flag.default is MISSING else field(default=flag.default)

    fields = [declared(name) for name in first]
    for group, names in groups.items():
        part = make_dataclass(group, [declared(name) for name in names], kw_only=True)
        fields.append((f"group_{group}", Annotated[part, tyro.conf.arg(help="", name=group)], field()))
    whole = make_dataclass("Flags", fields, kw_only=True)
    if positional is not None:
        text += f" {prog} {positional.upper()} is the same as {prog} --{positional} {positional.upper()}."
    no_pairs = (tyro.conf.FlagCreatePairsOff,)  # --json, and no --no-json
    found, unknown = tyro.cli(whole, prog=prog, args=args, description=text, config=no_pairs, return_unknown_args=True)
    values = {name: getattr(found, name) for name in first}
    for group, names in groups.items():
        values |= {name: getattr(getattr(found, f"group_{group}"), name) for name in names}
    wrong = next((arg for arg in unknown if arg.startswith("-")), None)
    if wrong is None and positional is not None and len(unknown) == 1:
        if any(arg.partition("=")[0] == f"--{positional}" for arg in args):
            _refuse(prog, f"{positional} is given twice, with its name and without it")
        values[positional], unknown = unknown[0], []
    if unknown:
        options = [option(name) for name in flags]
        near = difflib.get_close_matches((wrong or unknown[0]).replace("_", "-"), options, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{prog} --help lists them"
        _refuse(prog, f"there is no flag {wrong}: {hint}" if wrong else f"{unknown[0]!r} follows no flag: {hint}")
    return values


def _refuse(prog: str, why: str) -> NoReturn:
    print(f"{prog}: {why}", file=sys.stderr)
    raise SystemExit(2)
