"""Reports a loader that does not return, and raises an error if it returns too late."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

from skirl.tools.interrupts import Hold

log = logging.getLogger("skirl")


class StageStuck(RuntimeError):
    """A stage, or the loader, made no progress for longer than the patience allows."""


class Watch:
    """Watches the reads of one pass over a loader, which runs in the loop's own thread.

    A thread reports a read that takes longer than the patience: the stacks of all threads go to stderr and one sentence
    to the log. It reports again after twice the time, and so on. The loader itself is left alone. When it returns, the
    loop gets `StageStuck`.

    >>> watch = Watch(patience=0.2)
    >>> with Hold() as hold, watch.reading(hold, 3):
    ...     time.sleep(0.3)
    Traceback (most recent call last):
    skirl.pipeline.loader_watch.StageStuck: the loader took 0.3 s for batch 3, and patience is 0.2 s: fix the loader, or raise lookahead(patience=...) if it is only slow
    >>> watch.close()
    """  # noqa: E501

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._now: tuple[int, float] | None = None
        """The batch that is being read and since when. Set as one tuple, so that it needs no lock."""
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @contextmanager
    def reading(self, hold: Hold, number: int) -> Iterator[None]:
        """Watch the block, in which the loader's code runs, and let Ctrl-C through."""
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
        """End the thread."""
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
    for stream in filter(None, (sys.stderr, sys.__stderr__)):  # the first may be a notebook's, which is no file
        try:
            faulthandler.dump_traceback(stream)
        except (AttributeError, OSError, RuntimeError, ValueError):
            continue
        break
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
    """Format a time for a message.

    >>> seconds(0.25), seconds(600.2)
    ('0.2 s', '600 s')
    """
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"
