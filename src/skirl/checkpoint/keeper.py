"""Decide when a run saves: every given number of steps or minutes, at its end, and when it is told to stop."""

import logging
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from skirl.checkpoint import Saving, load, save
from skirl.checkpoint import folder as folders
from skirl.checkpoint.saving import claimed
from skirl.checkpoint.votes import agreed, trainers_of
from skirl.nn.collection import collections_of
from skirl.peers.processes import launched_here
from skirl.store.disk.os_files import Lock
from skirl.tools.interrupts import Signals
from skirl.tools.os_errors import NotWritten, why

log = logging.getLogger("skirl")


class Asked(NamedTuple):
    """A request to a run between two steps. All trainers of a job must get the same one."""

    stop: bool = False
    save: bool = False


class Keeper:
    """Saves a run. Use it in a with-block inside the lookahead's. Entering it with `resume` is a new start of the run: an
    older one that may still be alive saves and logs nothing from then on. At SIGTERM or Ctrl-C the run saves after its
    current step and ends; a second one ends it at once. If a checkpoint cannot be written, the one before it stays, and the
    next one is tried anyway. If an error ends the run before its first step, its first checkpoint is removed."""

    def __init__(
        self,
        folder: Path | None,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
        resume: bool = False,
        keep_best: bool = False,
        first: bool = True,
        **whole: Any,
    ) -> None:
        self._signals = Signals(folder is not None, launched_here())
        self._stopped_by: str | None = None
        self._folder, self._every, self._minutes, self._keep = folder, every, minutes, keep or 2
        self._resume, self._first, self._whole = resume, first, whole
        self._best = folder / folders.BEST if keep_best and folder is not None else None
        self._start: int | None = None
        self._lock: Lock | None = None
        self._data = whole["data"]
        self._last: tuple[Saving, int, bool] | None = None
        self._tried_at = self._whole_at = self._best_at = -1
        self._failed: list[str] = []
        self._not_best: str | None = None
        self._savings: list[Saving] = []
        self._began = self._saved = time.monotonic()

    def __enter__(self) -> Self:
        folder = self._folder
        if folder is None:
            return self
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{folder} cannot be made, {why(error)}: set save to a folder that can be written to"
            ) from None
        if self._first and not launched_here():  # a launcher may start again before the system has ended the one before
            self._lock = Lock(folder)
        try:
            if not self._resume:
                folders.refuse_checkpoints(folder)
                if self._best is not None:
                    folders.refuse_checkpoints(self._best)
            else:
                self._go_on(folder)
        except BaseException:
            self._release()
            raise
        self._signals.__enter__()
        return self

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def _go_on(self, folder: Path) -> None:
        """Claim the folder before looking for checkpoints, so that no older start changes it afterwards. Then resume."""
        model = self._whole["model"]
        collections = collections_of(model)
        peers = trainers_of(model)

        def claim() -> int | None:
            with suppress(OSError):  # the first save tries again
                return None if peers.rank else folders.claim(folder)

        self._start = agreed(peers, claim, "a start of the run begins")
        if any(folder.glob("checkpoint*.json")):  # also those that an older skirl wrote: they are refused
            load(folder, **self._whole)
            self._tried_at = self._whole_at = self._data.step
            if self._best is not None:
                self._best_at = next((step for step, _ in folders.headers_with_steps(self._best)), -1)
        else:
            for collection in collections.values():
                if len(store := collection.engine.store):
                    raise ValueError(
                        f"{folder} holds no checkpoint, and the store {store!r} holds rows of another run: name that run's "
                        "--save, or an empty store: another folder, which a node is given as its --store"
                    )
        if self._start is not None:
            number = claimed({name: of.engine for name, of in collections.items()}, folder, self._start)
            folders.drop_newer(folder, number, self._start)

    @property
    def found_none(self) -> bool:
        """True if the folder has held no checkpoint of the run so far."""
        return self._tried_at < 0

    def check(self) -> None:
        if self._folder is not None:
            folders.check_start(self._folder, self._start)

    def begin(self) -> None:
        """Begin or continue the run. Wait for a first checkpoint, so that the run can be resumed from here on."""
        self._began = self._saved = time.monotonic()
        if self._folder is not None:
            self._save()
            self._settle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._settle()
        finally:
            self._signals.__exit__(None, None, None)
            self._release()
        refused = isinstance(error, Exception) and not isinstance(error, folders.Superseded)
        if refused and self._data.step == 0 and self._savings and self._first:  # free the folder for another try
            folders.drop_newer(self._savings[0].folder, self._savings[0].number - 1, self._start)

    def asked(self) -> Asked:
        minutes = self._minutes is not None and time.monotonic() - self._saved >= 60 * self._minutes
        return Asked(self._signals.came is not None, minutes)

    def after_step(self, asked: Asked | None = None, *, last: bool = False, is_best: bool = False) -> bool:
        """Save if it is time to. Return whether the run must end here. asked: what all trainers have agreed on, None for
        what this process is asked for."""
        if self._folder is None:
            return False
        if self._last is not None and self._last[0].done:
            self._settle()
        stop, minutes = self.asked() if asked is None else asked
        steps = self._every is not None and self._data.step % self._every == 0
        is_best = is_best and self._best is not None
        if last or stop or minutes or steps or is_best:
            self._save(is_best=is_best)
        if stop:
            self._settle()
            self._stopped_by = None if last else self._signals.came or "another trainer"
        return stop

    def facts(self) -> dict[str, Any]:
        self._settle()
        pauses = [saving.pause for saving in self._savings]
        return {
            "count": len(pauses),
            "failed": len(self._failed),
            "last_failure": self._failed[-1] if self._failed else None,
            "newest": None if self._whole_at < 0 else self._whole_at,
            "best": None if self._best_at < 0 else {"folder": str(self._best), "step": self._best_at},
            "best_failure": self._not_best,
            "pause_share": sum(pauses) / max(1e-9, time.monotonic() - self._began),
            "bytes": sum(saving.bytes for saving in self._savings),
            "stopped_by": self._stopped_by,
        }

    def _save(self, *, is_best: bool = False) -> None:
        step = self._data.step
        if self._tried_at == step:
            return
        assert self._folder is not None
        began = time.perf_counter()
        self._settle()
        waited = time.perf_counter() - began
        self._tried_at, self._saved = step, time.monotonic()
        try:
            saving = save(self._folder, **self._whole, keep_last=self._keep, wait=False)
        except NotWritten as error:
            self._fail(step, error, is_best)
            return
        saving.pause += waited
        self._start = saving.start or self._start
        self._last = saving, step, is_best

    def _settle(self) -> None:
        if self._last is None:
            return
        saving, step, is_best = self._last
        try:
            saving.wait()
        except Exception as error:
            self._last = None
            if not isinstance(error, NotWritten):
                raise
            self._fail(step, error, is_best)
            return
        self._last = None
        self._savings.append(saving)
        self._whole_at = step
        if is_best:
            self._keep_best(saving, step)

    def _keep_best(self, saving: Saving, step: int) -> None:
        try:
            if self._first:
                folders.check_start(saving.folder, saving.start)
                folders.keep_best(saving.path)
        except (OSError, ValueError) as error:
            self._miss_best(step, f"it could not be kept in {self._best}: {why(error)}")
            log.warning("%s", self._not_best)
        else:
            self._best_at, self._not_best = step, None

    def _fail(self, step: int, error: NotWritten, is_best: bool) -> None:
        self._failed.append(f"step {step:,} is not saved: {error}")
        log.warning("%s. Training goes on, and the next checkpoint is tried all the same", self._failed[-1])
        if is_best:
            self._miss_best(step, "it could not be saved")

    def _miss_best(self, step: int, why_not: str) -> None:
        still = "none is kept yet" if self._best_at < 0 else f"that of step {self._best_at:,} stays"
        self._not_best = f"step {step:,} is the best so far, but {why_not}; {still}"
