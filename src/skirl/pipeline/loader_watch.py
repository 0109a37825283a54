"""Reports a loader that does not return, and raises an error if it returns too late."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import isfinite

from skirl.tools.interrupts import Hold

log = logging.getLogger("skirl")


class StageStuck(RuntimeError): ...


class Watch:
    """Watches the reads of one pass over a loader, which runs in the loop's own thread.

    A thread reports a read that takes longer than the patience, and again after twice the time, and so on: the stacks of
    all threads go to stderr and one sentence to the log. When the loader returns, the loop gets `StageStuck`.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._now: tuple[int, float] | None = None
        """The batch that is being read and since when. Set as one tuple, so that it needs no lock."""
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @contextmanager
    def reading(self, hold: Hold, number: int) -> Iterator[None]:
        if self._watcher is None and isfinite(self._patience):
            self._watcher = threading.Thread(target=self._watch, name="skirl-watch", daemon=True)
            self._watcher.start()
        self._now = number, time.monotonic()
        try:
            with hold.released():
                yield
            self._check()
        finally:
            self.rest(hold)

    def moved(self, number: int) -> None:
        """Note inside `reading` that the loader has reached this batch."""
        self._check()
        self._now = number, time.monotonic()

    def rest(self, hold: Hold) -> None:
        """Note that nothing is being read now. Call this again after `reading`: an interrupt may have skipped it there."""
        hold.resume()
        self._now = None

    def close(self) -> None:
        self._closed.set()
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.join(1.0)
        self._watcher, self._closed = None, threading.Event()  # ready for another with-block

    def abandon(self) -> None:
        self._closed = _SET

    def _check(self) -> None:
        assert self._now is not None
        number, began = self._now
        took = time.monotonic() - began
        if took > self._patience:
            raise StageStuck(
                f"the loader took {seconds(took)} for batch {number}, and patience is {seconds(self._patience)}: fix the "
                "loader, or raise lookahead(patience=...) if it is only slow"
            )

    def _watch(self) -> None:
        told, due = None, self._patience
        while not self._closed.wait(min(1.0, self._patience / 4)):
            now = self._now
            if now is None:
                continue
            if now != told:
                due = self._patience
            took = time.monotonic() - now[1]
            if took > due:
                told, due = now, 2 * took
                _report(now[0], took)


def _report(number: int, took: float) -> None:
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # without a terminal there may be no such file
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    log.error(
        "the loader has been at batch %d for %s; the stacks of all threads are on stderr. If it returns, the loop raises "
        "an error: raise lookahead(patience=...) if it is only slow. If it hangs, stop it with Ctrl-C, or with `kill %d` "
        "if that has no effect",
        number,
        seconds(took),
        os.getpid(),
    )


_SET = threading.Event()
_SET.set()


def seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"
