"""Holding Ctrl-C back while rows are half moved, letting it through at named points, and ending a run that it stops."""

import os
import signal
import threading
import time

# The functions of signal without a conversion to enums at each call: 0.2 us instead of 5.
from _signal import getsignal  # pyright: ignore[reportMissingImports]
from _signal import signal as install  # pyright: ignore[reportMissingImports]
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

QUIET = 0.5
"""Seconds for which SIGINT is held back after one was let through, so that clean-up code is reached."""


class Hold:
    """Holds SIGINT back until its block ends.

    Python runs signal handlers in the main thread only; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.active = False
        """True while SIGINT is handled here."""
        self.most: int | None = None
        """Number of interrupts at which one is let through inside the block, for code that may hang; None: none is."""
        self._before: Any = None
        self._lending = False
        self._quiet_until = 0.0
        self._pid = 0
        self._held: list[FrameType | None] = []

    def __enter__(self) -> "Hold":
        if threading.get_ident() == threading.main_thread().ident:
            before = getsignal(signal.SIGINT)
            # The default action and a handler outside Python cannot be called from here.
            if callable(before) or before == signal.SIG_IGN:
                self._before = before
                install(signal.SIGINT, self._hold)
                self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:
            self.active = self._lending = False
            install(signal.SIGINT, self._before)
            self.check()

    @property
    def count(self) -> int:
        return len(self._held)

    def check(self) -> None:
        """Let through the interrupts held back so far, as one."""
        if self._held:
            frame = self._held[-1]
            self._held.clear()
            self._hand_on(frame)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let SIGINT through while code runs that the user must be able to interrupt.

        After one interrupt, SIGINT is held back for `QUIET` seconds, so that `resume` is reached. If the code swallows
        the exception, later interrupts are let through again.
        """
        self.check()
        if self.active:
            self._lending = True
            self._quiet_until = 0.0
            self._pid = os.getpid()
            install(signal.SIGINT, self._lent)
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """Hold SIGINT back again, or do nothing after the end of the block.

        An interrupt may keep `released` from being left; its generator then ends whenever it is collected.
        """
        if self._lending:
            now = getsignal(signal.SIGINT)
            install(signal.SIGINT, self._hold)
            # Each access creates a new bound method: they are equal, not identical.
            if now != self._lent and callable(now):  # the user's code has set a handler of its own
                self._before = now
            self._lending = False

    def _hand_on(self, frame: FrameType | None) -> None:
        """Call the handler that was installed before; by default it raises KeyboardInterrupt."""
        if callable(self._before):
            self._before(signal.SIGINT, frame)

    def _lent(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that the loader has forked
            self._hand_on(frame)
            return
        now = time.monotonic()
        if not self._lending or now < self._quiet_until or self._leaves(frame):
            self._held.append(frame)
            return
        self._quiet_until = now + QUIET
        self._hand_on(frame)
        self._quiet_until = 0.0

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append(frame)
        if self.most is not None and len(self._held) >= self.most and not self._leaves(frame):
            self.check()

    def _leaves(self, frame: FrameType | None) -> bool:
        """Return whether the interrupted code is restoring the handler: raised there, ours would stay for good."""
        while frame is not None and not (frame.f_code is Hold.__exit__.__code__ and frame.f_locals["self"] is self):
            frame = frame.f_back
        return frame is not None


_NAMES: dict[int, str] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Signals:
    """Catches SIGTERM and Ctrl-C inside its block, so that a run is saved first; a second signal ends it at once.

    once: ignore later signals, as where a launcher passes one Ctrl-C on a second time, and ends who takes too long.
    """

    def __init__(self, on: bool = True, once: bool = False) -> None:
        self._on, self._once = on and threading.current_thread() is threading.main_thread(), once
        self._before: dict[int, Any] = {}
        self.came: str | None = None

    def __enter__(self) -> Self:
        if self._on:
            for number in _NAMES:
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _stop(self, number: int, frame: Any) -> None:
        if self.came is None:
            self.came = _NAMES[number]
        elif self._once:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
