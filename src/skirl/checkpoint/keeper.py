"""When a run saves: every so many steps or minutes, at its end, and when it is told to stop.

SIGTERM is how schedulers and `docker stop` ask a process to end. The handler notes it; the run saves after the step that
it is in and ends as if it were done, since a signal handler that saved by itself would find rows half moved. A second
SIGTERM does what it would have done without us, for whoever cannot wait for the step. A checkpoint stands at step 0, too:
a run that is killed before its first interval is over can be resumed all the same.
"""

import logging
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from skirl.checkpoint import Saving, load, numbers, save
from skirl.nn.collection import collections_of

log = logging.getLogger("skirl")


@dataclass(frozen=True, kw_only=True)
class SaveFlags:
    """Where a run is saved, and when.

    >>> SaveFlags(save_every=5)
    Traceback (most recent call last):
    ValueError: save_every, save_minutes, keep and resume need a folder: set save
    """

    save: Path | None = None
    """A folder for checkpoints; the run is saved there at its beginning and its end, and at SIGTERM, which ends it."""
    save_every: int | None = None
    """Steps between two checkpoints."""
    save_minutes: float | None = None
    """Minutes between two checkpoints."""
    keep: int | None = None
    """Checkpoints that stay in the folder, the newest ones: 2 if not given."""
    resume: bool = False
    """Go on from the newest checkpoint in --save that is whole; an empty folder begins a run."""

    def __post_init__(self) -> None:
        if self.save is None and (self.save_every or self.save_minutes or self.keep or self.resume):
            raise ValueError("save_every, save_minutes, keep and resume need a folder: set save")
        if self.save_every is not None and self.save_every < 1:
            raise ValueError(f"save_every is {self.save_every}: set it to 1 or more steps")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes is {self.save_minutes}: set it to minutes above 0")
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}: set it to 1 or more checkpoints")


class Keeper:
    """Saves a run as its flags say; use it in a with-block, inside the lookahead's. Entering it resumes.

    whole: what `skirl.save` and `skirl.load` take, `data` being the lookahead.
    """

    def __init__(self, flags: SaveFlags, **whole: Any) -> None:
        self.told_to_stop = False
        """SIGTERM came."""
        self._flags, self._whole = flags, whole
        self._data = whole["data"]
        self._before: Any = None
        self._handles = False
        self._last: Saving | None = None
        self._saved_at = -1
        self._savings: list[Saving] = []
        self._began = self._saved = time.monotonic()

    def __enter__(self) -> Self:
        flags = self._flags
        if flags.save is None:
            return self
        if not flags.resume:
            refuse_checkpoints(flags.save)
        if flags.resume and (
            not flags.save.is_dir() or numbers(flags.save) or any(flags.save.glob("checkpoint*.json"))
        ):
            load(flags.save, **self._whole)
            self._saved_at = self._data.step
        elif flags.resume:
            for collection in collections_of(self._whole["model"]).values():
                if len(store := collection.engine.store):
                    raise ValueError(
                        f"{flags.save} holds no checkpoint, and {store!r} rows: remove these to begin anew"
                    )
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._stop)
            self._handles = True
        return self

    def begin(self) -> None:
        """The run begins, or goes on: from here on it can be resumed."""
        self._began = self._saved = time.monotonic()
        if self._flags.save is not None:
            self._save()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for saving in self._savings[-1:]:
                saving.wait()
        finally:
            if self._handles:
                signal.signal(signal.SIGTERM, self._before)
                self._handles = False

    def after_step(self, *, last: bool = False) -> bool:
        """Save if it is time to; True when the run is to end here. last: there are no more steps."""
        flags, step = self._flags, self._data.step
        if flags.save is None:
            return False
        minutes = flags.save_minutes is not None and time.monotonic() - self._saved >= 60 * flags.save_minutes
        if last or self.told_to_stop or minutes or (flags.save_every is not None and step % flags.save_every == 0):
            self._save()
        if self.told_to_stop:
            self._savings[-1].wait()
        return self.told_to_stop

    def facts(self) -> dict[str, Any]:
        """What saving took."""
        for saving in self._savings[-1:]:
            saving.wait()
        pauses = [saving.pause for saving in self._savings]
        return {
            "count": len(pauses),
            "pause_seconds": sum(pauses),
            "pause_most": max(pauses, default=0.0),
            "pause_share": sum(pauses) / max(1e-9, time.monotonic() - self._began),
            "bytes": sum(saving.bytes for saving in self._savings),
            "stopped_by": "SIGTERM" if self.told_to_stop else None,
        }

    def _save(self) -> None:
        if self._saved_at != self._data.step:
            assert self._flags.save is not None
            self._savings.append(save(self._flags.save, **self._whole, keep=self._flags.keep or 2, wait=False))
            self._saved_at, self._saved = self._data.step, time.monotonic()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.told_to_stop:
            self.told_to_stop = True
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def refuse_checkpoints(folder: Path) -> None:
    """Another run's checkpoints would be pushed out of their folder, and stand in for ours until then."""
    if folder.is_dir() and numbers(folder):
        raise ValueError(
            f"{folder} holds the checkpoints of a run: add --resume to go on from them, or name another folder"
        )
