"""A process that ends with its parent, and how long one process waits for another."""

import ctypes
import os
import signal
from collections.abc import Mapping
from contextlib import suppress

_SET_PARENT_DEATH_SIGNAL = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent ends, however that ends. Only Linux can."""
    with suppress(AttributeError, OSError):  # not on Linux
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def patience_of(environment: Mapping[str, str], otherwise: float = 600.0) -> float:
    """Return the seconds that SKIRL_PATIENCE sets in the environment.

    >>> patience_of({}), patience_of({"SKIRL_PATIENCE": "90"})
    (600.0, 90.0)
    >>> patience_of({"SKIRL_PATIENCE": "long"})
    Traceback (most recent call last):
    ValueError: SKIRL_PATIENCE is 'long' in the environment: set it to seconds above 0
    """
    text = environment.get("SKIRL_PATIENCE", str(otherwise))
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"SKIRL_PATIENCE is {text!r} in the environment: set it to seconds above 0")
