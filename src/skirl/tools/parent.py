"""A process that ends with the one that started it."""

import ctypes
import os
import signal
from contextlib import suppress

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, however that ends. Only Linux can."""
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
