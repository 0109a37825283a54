"""The flags of a sweep, except those of training. Each part is checked when it is made."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from skirl.sweep.rules import FIRST, Rules
from skirl.train.flags import CacheFlags, EvaluationFlags
from skirl.train.recipe import Recipe

_RUNG = re.compile(r"(\d+)|(\d+(?:\.\d+)?)%")
_FIRST_SHARE = 0.02
"""Length of a race's first stretch, as a share of the steps of an epoch."""


MISSING = "search is set, but Optuna is not installed: pip install 'skirl[sweep]', or give the values with --vary"
FEWEST, MOST, USUAL = 100, 200, 50
"""Least and most lines of metrics if the number of steps is known; steps between two lines if that gives as many."""


def points(steps: int | None) -> int:
    """Return the steps between two lines of metrics: enough lines for a short sweep's curves, not too many for a long one.

    >>> [points(steps) for steps in (5, 100, 400, 5_000, 100_000, None)]
    [1, 1, 4, 50, 500, 50]
    """
    if steps is None:
        return USUAL
    return max(1, min(max(USUAL, -(-steps // MOST)), steps // FEWEST))


def check_store(store: str) -> None:
    """Raise if a sweep cannot keep its rows in a store.

    **Arguments**

    - `store`: as `--store` names it.

    >>> check_store("rpc://node:1")
    Traceback (most recent call last):
    ValueError: store is 'rpc://node:1', and a sweep keeps its rows in memory or on disk: set it to memory or disk:FOLDER
    """
    sites: list[str] = []
    if store.startswith("placed:"):
        from skirl.store import plan_of

        sites = [site.store for site in plan_of(store)[0].sites]
    if found := next((one for one in (store, *sites) if "rpc://" in one), None):
        where = f"store is {store!r}" + (f", which has {found}" if sites else "")
        raise ValueError(f"{where}, and a sweep keeps its rows in memory or on disk: set it to memory or disk:FOLDER")


@dataclass(frozen=True, kw_only=True)
class StoreFlags(CacheFlags):
    """As for a run, without memory nodes."""

    store: str = "memory"
    """Where the rows outside the cache are: memory, disk:FOLDER, in which each variant has a folder of its name, or
    placed:PLAN.json for several of these."""

    def __post_init__(self) -> None:
        check_store(self.store)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SweepRecipe(Recipe):
    """What the variants have in common."""

    cache: StoreFlags = field(default_factory=StoreFlags)


@dataclass(frozen=True, kw_only=True)
class JudgeFlags(EvaluationFlags):
    """When variants are evaluated, and when one of them stops for it."""

    eval_every: int | None = None
    """Steps between two evaluations of every variant on the samples that --valid holds out; there is always one at the
    end."""
    patience: int | None = None
    """A variant leaves after this many evaluations in a row without a better test log loss of its own. It keeps its
    last state, not its best one."""


@dataclass(frozen=True, kw_only=True)
class VaryFlags:
    """What differs between variants."""

    group: ClassVar[str] = "sweep"

    vary: tuple[str, ...] = ()
    """A flag and its values, such as lr=0.01,0.02; given several times, every combination is a variant. Sizes of
    layers are joined by x: top=64x32,128x64."""
    variants: Path | None = None
    """A file of variants: TOML with a table for each, CSV with a line for each, or JSON lines; with --vary, each of
    them is combined with every combination."""


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """How variants are drawn.

    >>> SearchFlags(search=("lr=log:1e-3..1",))
    Traceback (most recent call last):
    ValueError: search is set and trials is not: set trials to how many variants are drawn
    """

    group: ClassVar[str] = "sweep"

    search: tuple[str, ...] = ()
    """A flag and what Optuna draws its value from: lr=log:1e-3..1, lr=0.1..0.5 or optimizer=sgd,adam. Given several
    times, each trial has a value for each; with --vary seed=0,1 it is trained with each seed. Needs skirl[sweep]."""
    trials: int | None = None
    """How many trials to draw."""
    sampler: Literal["tpe", "random", "qmc"] = "tpe"
    """How values are drawn: tpe learns from the trials of earlier sweeps in the study; random does not; qmc covers the
    space evenly, and needs scipy."""
    study: str | None = None
    """Where Optuna keeps the trials for later sweeps to learn from: a file, or one of its URLs, such as
    sqlite:///study.db."""

    def __post_init__(self) -> None:
        if not self.search:
            for name in ("trials", "study"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r} and search is not set: set search, or leave it out"
                    )
            return
        if self.trials is None:
            raise ValueError("search is set and trials is not: set trials to how many variants are drawn")
        if self.trials < 1:
            raise ValueError(f"trials is {self.trials}: set it to 1 or more")
        from skirl.sweep.space import combinations, spaces_of

        many = combinations(spaces_of(self.search))
        if many is not None and many < self.trials:
            raise ValueError(
                f"trials is {self.trials}, but the search has only {many:,} different ones: set trials to {many:,} or less, "
                "or give the values with --vary"
            )


@dataclass(frozen=True, kw_only=True)
class RaceFlags:
    """When variants leave.

    >>> RaceFlags(rungs="5%,100").rules(steps=1000)
    Rules(alpha=0.05, keep=1, rungs=(50, 100), first=20)
    >>> RaceFlags(rungs="5%").rules(steps=None)
    Traceback (most recent call last):
    ValueError: rungs is '5%', and the number of steps is unknown: set steps, or give rungs in steps
    """

    group: ClassVar[str] = "sweep"

    alpha: float = 0.05
    """The highest probability that the best variant is dropped by mistake; 0: no variant is dropped for a deficit."""
    keep: int = 1
    """How many configurations are trained to the end, or fewer if some end by --patience or diverge. The seeds of one
    configuration leave together for their losses; if one of them ends by itself, the race compares those that are left."""
    rungs: str | None = None
    """Steps, or shares of the run, such as 5%,10%,20%,30%: after each one, only half of the configurations go on. With
    several epochs, each waits for the next evaluation."""

    def __post_init__(self) -> None:
        Rules(alpha=self.alpha, keep=self.keep)
        self.rules(100)

    def rules(self, steps: int | None, epochs: int = 1, every: int | None = None) -> Rules:
        """Return the rules of a race.

        **Arguments**

        - `steps`: steps of all epochs; None if their number is unknown.
        - `epochs`: with several, rungs wait for an evaluation, as losses of training tell nothing from the second on.
        - `every`: steps between two evaluations.

        >>> RaceFlags(rungs="5%,10%").rules(1000, epochs=2, every=40)
        Rules(alpha=0.05, keep=1, rungs=(80, 120), first=10)
        """
        rungs = []
        for word in [] if self.rungs is None else self.rungs.split(","):
            found = _RUNG.fullmatch(word.strip())
            if found is None or float(found[1] or found[2]) <= 0 or float(found[2] or 0) > 100:
                raise ValueError(
                    f"rungs is {self.rungs!r}: set it to steps, or shares of the run that rise, such as 5%,10%,20%,30%"
                )
            if found[1]:
                rungs.append(int(found[1]))
                continue
            if steps is None:
                raise ValueError(
                    f"rungs is {self.rungs!r}, and the number of steps is unknown: set steps, or give rungs in steps"
                )
            rungs.append(max(1, int(steps * float(found[2]) / 100)))
        if epochs > 1 and every is not None:
            rungs = [-(-rung // every) * every for rung in rungs]
        first = FIRST if steps is None else max(FIRST, int(steps / epochs * _FIRST_SHARE))
        return Rules(alpha=self.alpha, keep=self.keep, rungs=tuple(sorted(set(rungs))), first=first)
