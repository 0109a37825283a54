"""The time that a thread of this process waits for the GIL, measured from outside the work."""

import ctypes
import os
import threading
from types import TracebackType
from typing import Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

_libc = ctypes.CDLL(None)
_usleep, _clock_gettime = _libc.usleep, _libc.clock_gettime
_usleep.argtypes, _usleep.restype = [ctypes.c_uint], ctypes.c_int
_clock_gettime.argtypes, _clock_gettime.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int

_MONOTONIC = 1
_PERIOD = 1000


@njit(nogil=True)  # not cached: it holds addresses of this process
def _now(out: NDArray[np.int64]) -> None:
    _clock_gettime(_MONOTONIC, out.ctypes)


@njit(nogil=True)
def _sleep(out: NDArray[np.int64]) -> None:
    _usleep(_PERIOD)
    _clock_gettime(_MONOTONIC, out.ctypes)


class Waits:
    """Measures waits for the GIL while a block runs.

    >>> import time
    >>> with Waits() as waits:
    ...     time.sleep(0.1)
    >>> len(waits.us) > 5, waits.summary()["mean_us"] < 5000
    (True, True)
    """

    def __init__(self) -> None:
        self.us: list[float] = []
        """Microseconds of each wait."""
        self._stop = threading.Event()
        self._pid = os.getpid()
        clock = np.zeros(2, np.int64)
        _now(clock)
        _sleep(clock)  # compile before anything is measured
        self._thread = threading.Thread(target=self._watch, name="skirl-waits", daemon=True)

    def _watch(self) -> None:
        woke, back = np.zeros(2, np.int64), np.zeros(2, np.int64)
        while not self._stop.is_set():
            _sleep(woke)
            _now(back)
            self.us.append((back[0] - woke[0]) * 1e6 + (back[1] - woke[1]) / 1e3)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, float]:
        """Return the mean, median and 99th percentile in microseconds."""
        us = np.array(self.us or [0.0])
        return {
            "mean_us": round(float(us.mean()), 1),
            "median_us": round(float(np.median(us)), 1),
            "p99_us": round(float(np.quantile(us, 0.99)), 1),
        }
