"""When a run saves: every so many steps or minutes, at its end, and when it is told to stop."""

import logging
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from skirl.checkpoint import Saving, load, numbers, save
from skirl.nn.collection import collections_of

log = logging.getLogger("skirl")


class Keeper:
    """Saves a run; use it in a with-block, inside the lookahead's. Entering it resumes.

    At SIGTERM the run saves after the step that it is in and ends; a second one ends it at once.

    **Arguments**

    - `folder`: for the checkpoints; None saves nothing.
    - `every`: steps between two checkpoints.
    - `minutes`: between two checkpoints.
    - `keep`: checkpoints that stay, the newest ones; 2, so that one is whole while the next is written.
    - `resume`: go on from the newest checkpoint that is whole; where there is none yet, the run begins. Without it a
      folder that holds checkpoints is refused.
    - `whole`: what `skirl.save` and `skirl.load` take, `data` being the lookahead.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        resume: bool = False,
        **whole: Any,
    ) -> None:
        self.told_to_stop = False
        """SIGTERM came."""
        self._folder, self._every, self._minutes, self._keep = folder, every, minutes, keep or 2
        self._resume, self._whole = resume, whole
        self._data = whole["data"]
        self._before: Any = None
        self._handles = False
        self._last: Saving | None = None
        self._saved_at = -1
        self._savings: list[Saving] = []
        self._began = self._saved = time.monotonic()

    def __enter__(self) -> Self:
        folder = self._folder
        if folder is None:
            return self
        if not self._resume:
            refuse_checkpoints(folder)
        elif numbers(folder) or any(folder.glob("checkpoint*.json")):
            load(folder, **self._whole)
            self._saved_at = self._data.step
        else:
            for collection in collections_of(self._whole["model"]).values():
                if len(store := collection.engine.store):
                    raise ValueError(f"{folder} holds no checkpoint, and {store!r} rows: remove these to begin anew")
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._stop)
            self._handles = True
        return self

    def begin(self) -> None:
        """The run begins, or goes on: from here on it can be resumed, and so the first checkpoint is waited for."""
        self._began = self._saved = time.monotonic()
        if self._folder is not None:
            self._save()
            for saving in self._savings:
                saving.wait()

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
        if self._folder is None:
            return False
        minutes = self._minutes is not None and time.monotonic() - self._saved >= 60 * self._minutes
        steps = self._every is not None and self._data.step % self._every == 0
        if last or self.told_to_stop or minutes or steps:
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
            assert self._folder is not None
            self._savings.append(save(self._folder, **self._whole, keep=self._keep, wait=False))
            self._saved_at, self._saved = self._data.step, time.monotonic()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.told_to_stop:
            self.told_to_stop = True
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def refuse_checkpoints(folder: Path) -> None:
    """Another run's checkpoints would be pushed out of their folder, and stand in for ours until then."""
    if numbers(folder):
        raise ValueError(
            f"{folder} holds the checkpoints of a run: add --resume to go on from them, or name another folder"
        )
