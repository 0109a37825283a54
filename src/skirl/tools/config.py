"""Flags from a file: TOML, or the config.json that a run leaves in its folder."""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from skirl.tools.flags import Flag, read_as

LEFT = {"config.json": "train", "sweep.json": "sweep"}
"""Files in which commands leave their flags, and the command of each."""


def read_config(
    path: Path,
    flags: Mapping[str, Flag],
    *,
    others: Collection[str] = (),
    of_sweep: Mapping[str, Flag] = {},
    of_one_run: Mapping[str, Collection[str]] = {},
) -> dict[str, Any]:
    """Return the flags that a file sets, by name."""
    if path.is_dir():
        path = next((path / name for name in LEFT if (path / name).is_file()), path / "config.json")
    found = _parsed(path)
    left = set(found) >= {"command", "flags"}  # by a command
    if left:
        left_out = of_one_run.get(str(found["command"]), ())
        found = {name: value for name, value in found["flags"].items() if name not in left_out}
    values = {}
    for key, value in found.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
            raise ValueError(f"{path}: [{key}] is a table: write flags at the top of the file")
        name = key.replace("-", "_")
        name = f"{name}_" if f"{name}_" in {*flags, *others} else name  # a word that Python keeps for itself
        if name in flags:
            try:
                values[name] = read_as(flags[name].type, value)
            except TypeError as expected:
                if left and value is None:  # that command may do without it
                    continue
                given = json.dumps(value, default=str)
                quoted = f', such as "{given}"' if str(expected) == "text" and isinstance(value, int | float) else ""
                raise ValueError(f"{path}: {key} is {given}: set it to {expected}{quoted}") from None
        elif name not in others:
            if name in of_sweep and value in (of_sweep[name].default, [], None):
                continue
            if name in of_sweep:
                raise ValueError(
                    f"{path}: {key} is a flag of skirl sweep, not of this command: use `skirl sweep --config {path}`, or "
                    "leave it out"
                )
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            raise ValueError(f"{path}: {key} is not a flag of this command: {hint}")
    return values


def _parsed(path: Path) -> dict[str, Any]:
    kind, text = "JSON" if path.suffix == ".json" else "TOML", ""
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except OSError:
        raise ValueError(
            f"config is {str(path)!r}, which cannot be read: set it to a TOML file or a config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        if found := re.match(r"Cannot overwrite a value \(at (?:line (\d+)|end)", str(error)):
            lines = text.splitlines()[: int(found[1]) if found[1] else None]
            keys = [match[1] for line in lines if (match := re.match(r"\s*([\w-]+)\s*=", line))]
            key = keys[-1] if keys and keys.count(keys[-1]) > 1 else "a flag"
            raise ValueError(
                f"{path}: {key} is set twice, again in line {len(lines)}: leave one of the two out"
            ) from None
        raise ValueError(
            f"{path}: this is not valid {kind} ({error}): set config to a TOML file or a config.json"
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("flags", {}), dict):
        raise ValueError(f"{path}: there are no flags in it: set config to a TOML file or a config.json")
    return found
