"""The flags of a sweep, except those of training. Each part is checked when it is made."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skirl.checkpoint.folder import OF_SWEEP
from skirl.sweep.race import Rules
from skirl.train.flags import CheckpointFlags

_RUNG = re.compile(r"(\d+)|(\d+(?:\.\d+)?)%")


def points(steps: int | None) -> int:
    """Return the steps between two lines of metrics: 100 to 200 lines if the number of steps is known and large enough."""
    return 50 if steps is None else max(1, steps // 100)


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
        Rules(keep=self.keep)
        self.rules(1 << 62)  # how long the run is comes later

    def rules(self, steps: int | None, epochs: int = 1, every: int | None = None) -> Rules:
        """Return the rules of a race."""
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
        if steps is not None and max(rungs, default=0) > steps:
            raise ValueError(f"rungs is {self.rungs!r}, and the run has {steps} steps: set rungs below that")
        if epochs > 1 and every is not None:
            rungs = [-(-rung // every) * every for rung in rungs]
        return Rules(keep=self.keep, rungs=tuple(sorted(set(rungs))), again=epochs > 1)


@dataclass(frozen=True, kw_only=True)
class KeepFlags(CheckpointFlags):
    """Where a sweep is saved, and when."""

    save: Path | None = None
    """A folder for checkpoints, with a subfolder for each variant. The sweep is saved at its end, and when SIGTERM or
    Ctrl-C ends it; a variant that leaves is saved as it was then, unless it diverged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.save is not None and not self.resume and self.there:
            raise ValueError(
                f"save is {self.save}, which holds a sweep: add --resume to go on with it, or set another folder"
            )

    def due(self, step: int, seconds: float) -> bool:
        late = self.save_minutes is not None and seconds >= 60 * self.save_minutes
        return late or (self.save_every is not None and step % self.save_every == 0)

    @property
    def goes_on(self) -> bool:
        return self.resume and self.there

    @property
    def there(self) -> bool:
        return self.save is not None and (self.save / OF_SWEEP).is_file()
