"""How far long work has come, which the display of the command line shows if there is one, and how fast it goes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

Facts = Mapping[str, str]
Report = Callable[[int, Callable[[], Facts]], None]
"""Takes how many steps are done, and what returns the facts to show; it is called only if they are shown."""
Display = Callable[[str, int | None], AbstractContextManager[Report]]
"""Takes a title, and the number of steps if it is known."""
_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def progress_of(title: str, steps: int | None = None) -> Iterator[Report]:
    if (display := _display.get()) is None:
        yield lambda done, facts: None
        return
    with display(title, steps) as report:
        yield report


@contextmanager
def shown_by(display: Display | None) -> Iterator[None]:
    """Show all progress in this block; None shows none."""
    before = _display.set(display)
    try:
        yield
    finally:
        _display.reset(before)


class Speed:
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
        began = time.monotonic()
        try:
            yield
        finally:
            self._started += time.monotonic() - began

    def reached(self, samples: int) -> None:
        if self._warm is None:
            self._warm = self.seconds, samples

    def rate(self, samples: int) -> float:
        if self._warm is None:
            return 0.0
        return (samples - self._warm[1]) / max(self.seconds - self._warm[0], 1e-9)
