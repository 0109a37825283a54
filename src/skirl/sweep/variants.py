"""Variants: a name and overrides of a sweep's flags, by lists of values or from a file; and the flags of a race."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from skirl.checkpoint.folder import OF_SWEEP, refuse_checkpoints
from skirl.tools.flags import Flag, WrongFlags, expected, flags_of, is_list, read_text
from skirl.tools.os_errors import why
from skirl.train.flags import CheckpointFlags
from skirl.train.recipe import Recipe

_SHARED = ("data", "step", "cache", "movement", "device")
"""Parts of a recipe that all variants share: the batches, the plan, and where and in which numbers they compute. Only the
seed of initial rows and weights may vary; the data keeps the recipe's seed."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,=+-]{0,199}")


@dataclass(frozen=True)
class Variant:
    """One of the models that share a stream.

    **Arguments**

    - `name`: its name, which no other variant has.
    - `overrides`: values that differ from the sweep's, by name. `skirl.Sweep` uses `lr` and `optimizer` (of its rows),
      `seed`, `dim` and `tables`, which may differ only in dim and initial values; all others are for `make_model`.

    >>> Variant("small", {"dim": 8}).overrides["dim"]
    8
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Varied(Variant):
    """A variant of a recipe, whose overrides are flags."""

    recipe: Recipe = field(kw_only=True)
    """The recipe with these flags. Where `seed` is not the sweep's, `data_seed` keeps the sweep's batches."""


def variants_of(base: Recipe, vary: Sequence[str] = (), file: Path | None = None) -> list[Varied]:
    """Return the variants: each variant of the file combined with every combination of the lists."""
    if not vary and file is None:
        raise ValueError("a sweep has no variant: set vary, such as lr=0.01,0.02, or set variants to a file of them")
    named = [("", dict[str, Any]())] if file is None else _of_file(file)
    axes = [_axis(text) for text in vary]
    for name in (names := [name for name, _ in axes]):
        if names.count(name) > 1:
            raise ValueError(f"vary has {name} twice: put all its values behind one {name}=")
        if over := next((own for own, more in named if name in more), None):
            raise ValueError(f"vary has {name}, and so has variant {over} of {file}: set it in one of the two")
    made = []
    for own, more in named:
        for values in product(*(values for _, values in axes)):
            over = dict(zip(names, values, strict=True))
            name = ",".join(filter(None, [own, text_of(over)]))
            made.append((name, more | over))
    return checked_variants(base, made)


def checked_variants(base: Recipe, named: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Varied]:
    """Make variants of names and overrides. Raise if two are alike, or if a value is not valid."""
    variants: list[Varied] = []
    for name, overrides in named:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"variant {name!r} has a name that its folder cannot have: use up to 200 letters, digits and _ . , = + -"
            )
        try:
            recipe = Recipe.of(**base.flat() | dict(overrides))
        except (ValueError, TypeError) as error:
            raise ValueError(f"variant {name}: {error}") from error
        if recipe.data.seed != base.data.seed:
            recipe = replace(recipe, data=replace(recipe.data, data_seed=base.data.stream_seed))
        if other := next((one.name for one in variants if one.recipe == recipe), None):
            raise ValueError(f"variants {other} and {name} are alike: leave one of them out")
        flat = recipe.flat()
        variants.append(Varied(name, {flag: flat[flag] for flag in overrides}, recipe=recipe))
    return variants


def check_store(store: str) -> None:
    if "rpc://" in store:
        raise ValueError(
            f"store is {store!r}, and a sweep keeps its rows in memory or on disk: set it to memory or disk:FOLDER"
        )


@cache
def varying() -> dict[str, Flag]:
    parts = [part.default_factory for part in fields(Recipe) if part.name in _SHARED]
    shared = {flag.name for part in parts for flag in fields(part)}  # type: ignore[arg-type]
    return {name: flag for name, flag in flags_of(Recipe).items() if name not in shared - {"seed"}}


def _flag(key: str) -> Flag:
    """Return a flag. Raise if there is none of this name, or if it cannot differ between variants."""
    name, can = key.strip().replace("-", "_"), varying()
    if name in can:
        return can[name]
    if name in flags_of(Recipe):
        raise ValueError(
            f"{name} cannot vary: all variants share the batches, the plan and the device; run one sweep for each value "
            f"of {name}"
        )
    raise ValueError(
        f"{name} is not a flag that can vary: those that can are {', '.join(each.replace('_', '-') for each in can)}"
    )


def seeds_of_one(variants: Sequence[Varied]) -> list[int]:
    """Return the configuration number of each variant. Variants that differ only in the seed share one."""
    numbers = dict[Recipe, int]()
    same = [replace(one.recipe, data=replace(one.recipe.data, seed=0, data_seed=None)) for one in variants]
    return [numbers.setdefault(recipe, len(numbers)) for recipe in same]


def text_of(overrides: Mapping[str, Any]) -> str:
    """Return a name made of the overrides.

    >>> text_of({"lr": 0.01, "top": (64, 32), "model": "dlrm-tiny"})
    'lr=0.01,top=64x32,model=dlrm-tiny'
    """
    return ",".join(
        f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in overrides.items()
    )


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    words = [word.strip() for word in values.split(",")]
    if not name.strip() or not equals or not all(words):
        raise ValueError(f"vary is {text!r}: set it to a flag and its values, such as lr=0.01,0.02")
    flag = _flag(name)
    return flag.name, [_of_text(text, flag, word) for word in words]


def _of_text(axis: str, flag: Flag, text: str) -> Any:
    try:
        if is_list(flag.type) and text != "None":
            return tuple(read_text(flag.type, word) for word in text.split("x"))
        return read_text(flag.type, text)
    except ValueError as near:
        hint = f" (did you mean {near}?)" if str(near) else ""
        wanted = "whole numbers with an x between, such as 64x32" if is_list(flag.type) else expected(flag.type)
        raise ValueError(f"vary {axis!r}: {flag.name} is {text!r}{hint}: set it to {wanted}") from None


def _of_file(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"variants is {str(path)!r}, which cannot be read as TOML ({why(error)}): fix it") from None
    if not tables:
        raise ValueError(f"{path} has no variant: write one or more, or leave variants out")
    if (outside := next((name for name, found in tables.items() if not isinstance(found, dict)), None)) is not None:
        raise ValueError(f"{path}: {outside} is outside of a table: write [NAME] above the values of each variant")
    return [(name, {_flag(key).name: value for key, value in found.items()}) for name, found in tables.items()]


_RUNG = re.compile(r"(\d+)|(\d+(?:\.\d+)?)%")


@dataclass(frozen=True, kw_only=True)
class RaceFlags:
    """When variants are dropped."""

    group: ClassVar[str] = "sweep"

    rungs: str | None = None
    """Steps, or shares of the run, such as 5%,10%,20%,30%: after each one, only half of the configurations go on, those
    with the lowest loss on samples that nobody had trained on. Without it, none is dropped. With several epochs, each
    waits for the next evaluation on the samples held out."""
    keep: int = 1
    """How many configurations at least go on after a rung, unless they diverge. The seeds of one configuration are dropped
    together; if one of them diverges, the race compares those that are left."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}: set it to 1 or more")
        self.at(1 << 62)  # how long the run is comes later

    def at(self, steps: int | None, epochs: int = 1, every: int | None = None) -> list[int]:
        """Return the rungs of a race. steps: known if they are shares of them."""
        rungs = []
        for word in [] if self.rungs is None else self.rungs.split(","):
            found = _RUNG.fullmatch(word.strip())
            if found is None or float(found[1] or found[2]) <= 0 or float(found[2] or 0) > 100:
                raise ValueError(
                    f"rungs is {self.rungs!r}: set it to steps, or to shares of the run, such as 5%,10%,20%,30%"
                )
            share = (steps or 0) * float(found[2] or 0) / 100
            rungs.append(int(found[1] or max(1, int(share))))
        if steps is not None and max(rungs, default=0) >= steps:
            raise WrongFlags(f"rungs is {self.rungs!r}, and the run has {steps} steps: set rungs below that")
        if epochs > 1 and every is not None:
            rungs = [-(-rung // every) * every for rung in rungs]
        return sorted(set(rungs))


@dataclass(frozen=True, kw_only=True)
class KeepFlags(CheckpointFlags):
    """Where a sweep is saved, and when."""

    save: Path | None = None
    """A folder for checkpoints, with a subfolder for each variant. The sweep is saved at its end, and when SIGTERM or
    Ctrl-C ends it; a variant that leaves is saved as it was then, unless it diverged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save is not None and not self.resume:
            refuse_checkpoints(self.save)

    @property
    def goes_on(self) -> bool:
        return self.resume and self.save is not None and (self.save / OF_SWEEP).is_file()
