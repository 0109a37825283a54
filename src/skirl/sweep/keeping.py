"""When a sweep is saved: at its start and end, every so many steps or minutes, and when SIGTERM or Ctrl-C ends it."""

import math
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from skirl.sweep.names import HEADER

_NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


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
        return (self.save / HEADER).is_file()


class Told:
    """Catches SIGTERM and Ctrl-C inside its block, so that the sweep is saved first; a second signal ends it at once.

    **Arguments**

    - `on`: whether the sweep is saved at all; if not, the signals keep their handlers.
    """

    def __init__(self, on: bool) -> None:
        self._on = on and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self.by: str | None = None
        """The signal that came, SIGTERM or Ctrl-C; None so far."""

    def __enter__(self) -> Self:
        if self._on:
            for number in _NAMES:
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _stop(self, number: int, frame: Any) -> None:
        if self.by is None:
            self.by = _NAMES[number]
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def plain(value: Any) -> Any:
    """Return `value` as JSON that every reader takes: numbers that are not finite become null, paths become text.

    >>> plain({"loss": float("nan"), "run": Path("runs")})
    {'loss': None, 'run': 'runs'}
    """
    if isinstance(value, dict):
        return {str(name): plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [plain(of) for of in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
