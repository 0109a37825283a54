"""Samples per second of a run, and its seconds without pauses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Speed:
    """Measures from now on.

    >>> speed = Speed()
    >>> speed.reached(100), speed.rate(100)
    (None, 0.0)
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._warm: tuple[float, int] | None = None
        """Seconds and samples after the first step, which compiles and does not count."""

    @property
    def seconds(self) -> float:
        """Seconds since the start, without pauses."""
        return time.monotonic() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this block out."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._started += time.monotonic() - began

    def reached(self, samples: int) -> None:
        """Take note of a step."""
        if self._warm is None:
            self._warm = self.seconds, samples

    def rate(self, samples: int) -> float:
        """Return samples per second since the first step."""
        if self._warm is None:
            return 0.0
        return (samples - self._warm[1]) / max(self.seconds - self._warm[0], 1e-9)
