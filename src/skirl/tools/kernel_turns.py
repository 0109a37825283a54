"""Processes that want the same kernel take turns: the first one compiles it, the others wait and load the result."""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from numba.core import event

try:
    import fcntl
except ImportError:  # not on Windows: there each process compiles
    fcntl = None

log = logging.getLogger("skirl")

PATIENCE = 60.0
"""Seconds to wait for another process: ten times what the largest kernel takes. Then it is compiled here as well."""
PAUSE = 0.01


class Turns(event.Listener):
    """The turns of this process. Each lasts until the compiler releases its lock, even if it fails."""

    def __init__(self) -> None:
        self._own = threading.local()

    def on_start(self, event: event.Event) -> None:
        self._open().append([])

    def on_end(self, event: event.Event) -> None:
        if levels := self._open():
            for path, file in levels.pop():
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # those who wait have it open, and look for the kernel first
                os.close(file)

    def take(self, path: Path) -> bool:
        """Wait for a turn, and return whether the kernel may have been kept by now."""
        levels = self._open()
        if fcntl is None or not levels:
            return False
        try:
            file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(PAUSE)
                    continue
                log.warning(
                    "another process has held %s for %.0f s: the kernel is compiled here as well", path, PATIENCE
                )
            except OSError:  # a file system without locks
                pass
            else:
                levels[-1].append((path, file))
                return True
            os.close(file)
            return False

    def _open(self) -> list[list[tuple[Path, int]]]:
        """Return what was taken under each lock of the compiler that this thread holds or waits for."""
        if not hasattr(self._own, "levels"):
            self._own.levels = []
        return self._own.levels


turns = Turns()
event.register("numba:compiler_lock", turns)
