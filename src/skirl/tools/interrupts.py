"""Ctrl-C waits while rows are half moved.

An interrupt between two moves would leave rows in neither place, and one inside `threading.Condition` a lock that nobody
releases. So SIGINT is held back wherever the loop's thread is at work on our behalf, and let through at named points: while
it waits, and while it runs the user's loader. A hold costs 3 us; undoing half a move would need a journal of every record.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

try:  # the same functions without a conversion to enums at each call: 0.2 us instead of 5
    from _signal import getsignal  # pyright: ignore[reportMissingImports]
    from _signal import signal as install  # pyright: ignore[reportMissingImports]
except ImportError:
    from signal import getsignal
    from signal import signal as install

QUIET = 0.5
"""Seconds for which SIGINT is held back after one was let through."""


class Hold:
    """Holds SIGINT back until its block ends; made by `uninterrupted`.

    Python runs signal handlers in the main thread only: in any other there is nothing to hold.
    """

    def __init__(self) -> None:
        self.active = False
        """Whether SIGINT comes here."""
        self.most: int | None = None
        """The interrupt that is let through at once, while something runs that may hang; None: none is."""
        self._before: Any = None
        self._handler: Callable[[FrameType | None], None] | None = None
        self._quiet_until = 0.0
        self._pid = 0
        self._held: list[FrameType | None] = []

    def __enter__(self) -> "Hold":
        if threading.get_ident() == threading.main_thread().ident:
            before = getsignal(signal.SIGINT)
            # Where the default action or a handler outside Python is set, there is nothing to hand the signal on to.
            if callable(before) or before == signal.SIG_IGN:
                self._before = before
                install(signal.SIGINT, self._hold)
                self.active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            self.active = False
            install(signal.SIGINT, self._before)
            self.check()

    @property
    def count(self) -> int:
        """Interrupts held back now."""
        return len(self._held)

    def check(self) -> None:
        """Let the interrupts held back so far through, as one."""
        if self._held:
            frame = self._held[-1]
            self._held.clear()
            self.hand_on(frame)

    def forget(self) -> None:
        """Drop what is held back."""
        self._held.clear()

    def hand_on(self, frame: FrameType | None) -> None:
        """Call the handler that was there before: by default it raises KeyboardInterrupt."""
        if callable(self._before):
            self._before(signal.SIGINT, frame)

    def lend(self, handler: Callable[[FrameType | None], None]) -> None:
        """Until `resume`, SIGINT goes to this handler: code runs that the user must be able to interrupt.

        After it has raised something, SIGINT is held back for a moment, so that `resume` is reached in peace; later it goes
        to the handler again, since the code has then swallowed what was raised.
        """
        self.check()
        if self.active:
            self._handler = handler
            self._quiet_until = 0.0
            self._pid = os.getpid()
            install(signal.SIGINT, self._lent)

    def resume(self) -> None:
        """Hold back again."""
        if self._handler is not None:
            now = getsignal(signal.SIGINT)
            install(signal.SIGINT, self._hold)
            # Bound methods are made anew at each access: equal, not identical.
            if now != self._lent and callable(now):  # the user's code has set a handler of its own
                self._before = now
            self._handler = None

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let SIGINT through in this block."""
        self.lend(self.hand_on)
        try:
            yield
        finally:
            self.resume()

    def _lent(self, number: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._pid
        ):  # a worker that the loader has forked: locks may be held by threads it does not have
            self.hand_on(frame)
            return
        now = time.monotonic()
        if self._handler is None or now < self._quiet_until:
            self._held.append(frame)
            return
        self._quiet_until = now + QUIET
        self._handler(frame)
        self._quiet_until = 0.0

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append(frame)
        if self.most is not None and len(self._held) >= self.most:
            self.check()


def uninterrupted() -> Hold:
    """Hold a SIGINT back until the block ends.

    >>> with uninterrupted() as hold:
    ...     hold.count
    0
    """
    return Hold()
