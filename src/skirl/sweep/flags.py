"""The flags of a sweep, but for those of training; each part is checked when it is made."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skirl.sweep.race import FIRST, Rules

_RUNG = re.compile(r"(\d+)|(\d+(?:\.\d+)?)%")
_FIRST_SHARE = 0.02
"""Of a run's steps, the first stretch of its race."""


@dataclass(frozen=True, kw_only=True)
class VaryFlags:
    """What differs between variants."""

    group: ClassVar[str] = "sweep"

    vary: tuple[str, ...] = ()
    """A flag and its values, such as lr=0.01,0.02; given several times, every combination is a variant.
    Sizes of layers have an x between: top=64x32,128x64."""
    variants: Path | None = None
    """A file of variants: TOML with a table for each, CSV with a line, or JSON lines; with --vary, each of them with every
    combination."""


@dataclass(frozen=True, kw_only=True)
class RaceFlags:
    """When variants leave.

    >>> RaceFlags(rungs="5%,100").rules(steps=1000)
    Rules(alpha=0.05, keep=1, rungs=(50, 100), first=20)
    >>> RaceFlags(rungs="5%").rules(steps=None)
    Traceback (most recent call last):
    ValueError: rungs is '5%', and how many steps there will be is not known before: set steps, or rungs to steps
    """

    group: ClassVar[str] = "sweep"

    alpha: float = 0.05
    """The probability that the best variant is dropped for a deficit that was taken for sure; 0: none leaves for one."""
    keep: int = 1
    """Configurations that are trained to the end; seeds of one configuration leave and stay together."""
    rungs: str | None = None
    """After each of these only half as many configurations go on: steps, or shares of the run, as 5%,10%,20%,30%."""

    def __post_init__(self) -> None:
        Rules(alpha=self.alpha, keep=self.keep)
        self.rules(100)

    def rules(self, steps: int | None) -> Rules:
        """The rules of a race over so many steps; None: not known before."""
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
                    f"rungs is {self.rungs!r}, and how many steps there will be is not known before: set steps, or rungs to "
                    "steps"
                )
            rungs.append(max(1, int(steps * float(found[2]) / 100)))
        first = FIRST if steps is None else max(FIRST, int(steps * _FIRST_SHARE))
        return Rules(alpha=self.alpha, keep=self.keep, rungs=tuple(sorted(set(rungs))), first=first)
