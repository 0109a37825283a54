"""The flags of a sweep, except those of training. Each part is checked when it is made."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from skirl.checkpoint.of_sweep import OF_SWEEP
from skirl.sweep.race import Rules
from skirl.sweep.variants import check_store
from skirl.train.flags import CacheFlags, EvaluationFlags
from skirl.train.recipe import Recipe

_RUNG = re.compile(r"(\d+)|(\d+(?:\.\d+)?)%")
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


@dataclass(frozen=True, kw_only=True)
class StoreFlags(CacheFlags):
    """As for a run, without memory nodes."""

    store: str = "memory"
    """Where the rows outside the cache are: memory, disk:FOLDER, in which each variant has a folder of its name, or
    several of these with weights: disk:a,disk:b*2."""

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
class RaceFlags:
    """When variants are dropped.

    >>> RaceFlags(rungs="5%,100").rules(steps=1000)
    Rules(keep=1, rungs=(50, 100))
    >>> RaceFlags(rungs="5%").rules(steps=None)
    Traceback (most recent call last):
    ValueError: rungs is '5%', and the number of steps is unknown: set steps, or give rungs in steps
    """

    group: ClassVar[str] = "sweep"

    rungs: str | None = None
    """Steps, or shares of the run, such as 5%,10%,20%,30%: after each one, only half of the configurations go on, those
    with the lowest loss on samples that nobody had trained on. Without it, none is dropped. With several epochs, each
    waits for the next evaluation on the samples held out."""
    keep: int = 1
    """How many configurations are trained to the end, or fewer if some end by --patience or diverge. The seeds of one
    configuration are dropped together; if one of them ends by itself, the race compares those that are left."""

    def __post_init__(self) -> None:
        Rules(keep=self.keep)
        self.rules(100)

    def rules(self, steps: int | None, epochs: int = 1, every: int | None = None) -> Rules:
        """Return the rules of a race.

        >>> RaceFlags(rungs="5%,10%").rules(1000, epochs=2, every=40)
        Rules(keep=1, rungs=(80, 120))
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
        return Rules(keep=self.keep, rungs=tuple(sorted(set(rungs))))


@dataclass(frozen=True, kw_only=True)
class KeepFlags:
    """Where a sweep is saved, and when.

    >>> KeepFlags(save_every=5)
    Traceback (most recent call last):
    ValueError: save_every, save_minutes, keep_best and resume need a folder: set save
    """

    group: ClassVar[str] = "save"

    save: Path | None = None
    """A folder for checkpoints, with a subfolder for each variant. The sweep is saved at its end, and when SIGTERM or
    Ctrl-C ends it; a variant that leaves is saved as it was then, unless it diverged."""
    save_every: int | None = None
    """Steps between two checkpoints."""
    save_minutes: float | None = None
    """Minutes between two checkpoints."""
    keep_best: bool = False
    """Also keep each variant's checkpoint with its best held-out log loss, in SAVE/VARIANT/best; needs --valid and
    --eval-every. All are saved whenever one is better than ever: early on, at nearly every evaluation."""
    from_: Path | None = None
    """Start every variant with the rows and dense weights of another run's newest checkpoint, to fine-tune them: its
    folder, or the header of one checkpoint. With --resume, this is where the sweep starts if --save holds no
    checkpoint yet."""
    resume: bool = False
    """Resume from the checkpoint in --save, the race too; if there is none yet, start the sweep."""

    def __post_init__(self) -> None:
        if self.save is None and (self.save_every or self.save_minutes or self.keep_best or self.resume):
            raise ValueError("save_every, save_minutes, keep_best and resume need a folder: set save")
        if self.save_every is not None and self.save_every < 1:
            raise ValueError(f"save_every is {self.save_every}: set it to 1 or more steps")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes is {self.save_minutes}: set it to minutes above 0")
        if self.save is not None and not self.resume and self.there:
            raise ValueError(
                f"save is {self.save}, which holds a sweep: add --resume to go on with it, or set another folder"
            )

    def due(self, step: int, seconds: float) -> bool:
        """Return whether a checkpoint is due after a step, given the seconds since the last one."""
        late = self.save_minutes is not None and seconds >= 60 * self.save_minutes
        return late or (self.save_every is not None and step % self.save_every == 0)

    @property
    def goes_on(self) -> bool:
        """True if resuming was asked for and there is a checkpoint to resume from."""
        return self.resume and self.there

    @property
    def there(self) -> bool:
        """True if the folder has a checkpoint of a sweep."""
        if self.save is None or not self.save.is_dir():
            return False
        return (self.save / OF_SWEEP).is_file()
