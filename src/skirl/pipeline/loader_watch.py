"""Notices a loader that does not come back.

The loader runs in the loop's thread, so nobody is there to lose patience with it. A thread looks at the clock once a second,
and after `patience` seconds over one batch it sends SIGINT to the loop's thread; the handler lent for the time of reading
raises `StageStuck` there, out of whatever the loader waits for: the traceback shows the line. Reading in a thread of our own
would need no signal, and slowed a 1 ms step to 313 ms. Where no signal can be raised (the loop runs in another thread than
the main one, or the loader hangs in native code) the log says what is known.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from types import FrameType

from skirl.tools.interrupts import QUIET, Hold

log = logging.getLogger("skirl")


class StageStuck(RuntimeError):
    """A stage made no progress for longer than the patience allows."""


class Watch:
    """Watches the reads of one pass over a loader.

    >>> watch = Watch(patience=0.2)
    >>> with Hold() as hold, watch.reading(hold, 3):
    ...     time.sleep(10)
    Traceback (most recent call last):
    skirl.pipeline.loader_watch.StageStuck: the loader is at batch 3 for 0.2 s. Mend it, or raise lookahead(patience=...) if it is only slow
    >>> watch.close()
    """  # noqa: E501

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._until: float | None = None
        self._thread: int | None = None
        self._number = 0
        self._hold: Hold | None = None
        self._fired = False
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @contextmanager
    def reading(self, hold: Hold, number: int) -> Iterator[None]:
        """The loader's code runs in this block, and may be interrupted."""
        if self._watcher is None and isfinite(self._patience):
            self._watcher = threading.Thread(target=self._watch, name="skirl-watch", daemon=True)
            self._watcher.start()
        with self._lock:
            self._hold, self._number = hold, number
            self._thread = threading.get_ident() if hold.active and hasattr(signal, "pthread_kill") else None
            self._until = time.monotonic() + self._patience
        hold.lend(self._interrupted)
        try:
            yield
        finally:
            self.rest(hold)

    def moved(self, number: int) -> None:
        """Inside `reading`: the loader has come to this batch."""
        # No lock: the handler of an interrupt takes it, in this thread, between any two of these lines.
        self._number = number
        self._until = time.monotonic() + self._patience

    def rest(self, hold: Hold) -> None:
        """Nothing is read now. To be called once more after `reading`: an interrupt may have kept it from this."""
        hold.resume()
        with self._lock:
            self._until = None
            late, self._fired = self._fired, False
        if late:  # our own signal is on its way, or held: it must not become a Ctrl-C
            while hold.active and not hold.count:
                time.sleep(0.001)
            hold.forget()
            raise StageStuck(self._sentence())

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.join(1.0)
        self._watcher, self._closed = None, threading.Event()  # ready for another with-block

    def abandon(self) -> None:
        """Let the thread end by itself; safe wherever the garbage collector may call it."""
        self._closed = _SET

    def _interrupted(self, frame: FrameType | None) -> None:
        """SIGINT while the loader runs: the user's, or the watcher's."""
        with self._lock:
            fired, self._fired = self._fired, False
        if fired:
            raise StageStuck(self._sentence())
        assert self._hold is not None
        self._hold.hand_on(frame)

    def _sentence(self) -> str:
        return (
            f"the loader is at batch {self._number} for {seconds(self._patience)}. Mend it, or raise "
            "lookahead(patience=...) if it is only slow"
        )

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._patience / 4)):
            with self._lock:
                now = time.monotonic()
                if self._until is None or now <= self._until:
                    continue
                self._until = now + max(self._patience, 2 * QUIET)  # once more, if the loader swallows the error
                log.error("%s", self._sentence())
                if self._thread is not None:
                    self._fired = True
                    signal.pthread_kill(self._thread, signal.SIGINT)


_SET = threading.Event()
_SET.set()


def seconds(time: float) -> str:
    """A time for a message.

    >>> seconds(0.25), seconds(600.2)
    ('0.2 s', '600 s')
    """
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"
