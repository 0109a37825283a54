"""Progress of a loop: a panel that stays in place on a terminal, a line every few seconds anywhere else."""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")

Facts = Mapping[str, str]
ON_TERMINAL = 0.2
"""Seconds between two updates of the panel."""
ELSEWHERE = 3.0
"""Seconds between two lines."""


class Progress:
    """Shows the progress of a loop: use it in a with-block, and call it once per step.

    `steps` is how many there are, None if not known. `begun` is a line to show first.

    >>> with Progress("train", steps=2, to=sys.stdout) as progress:
    ...     for done in (1, 2):
    ...         progress(done, lambda: {"loss": "0.693"})
    train 1/2 · loss 0.693
    train 2/2 · loss 0.693
    """

    def __init__(
        self,
        title: str,
        *,
        steps: int | None,
        to: TextIO | None = None,
        quiet: bool = False,
        begun: str = "",
    ) -> None:
        self._begun = begun
        self._quiet = quiet
        self._title = title
        self._steps = steps
        self._to = to or sys.stdout
        console = Console(file=self._to)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal and not quiet else None
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._due = 0.0
        self._shown = -1
        self._last: tuple[int, Callable[[], Facts]] | None = None

    def __call__(self, done: int, facts: Callable[[], Facts]) -> None:
        """Report that `done` steps are done. `facts` returns what else to show; it is called only when it is shown."""
        if self._quiet:
            return
        now = time.monotonic()
        if self._first is None:
            if self._begun:
                self._print(self._begun)
            self._first = (now, done)  # the first step compiles: it says nothing about the later ones
        self._last = (done, facts)
        if now >= self._due:
            self._show(now)

    def __enter__(self) -> "Progress":
        if self._live is not None:
            self._live.start()
            self._live.update(Text(f"{self._title} ..."), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._last is not None and self._last[0] != self._shown:
                self._show(time.monotonic())
        finally:
            if self._live is not None:
                self._live.stop()

    def _show(self, now: float) -> None:
        assert self._last is not None
        done, facts = self._last
        self._shown = done
        if self._live is not None:
            self._live.update(self._panel(done, facts, now), refresh=True)
            self._due = now + ON_TERMINAL
            return
        text = " · ".join(f"{name} {value}" for name, value in facts().items())
        of = "" if self._steps is None else f"/{self._steps}"
        self._due = now + ELSEWHERE
        self._print(f"{self._title} {done}{of} · {text}")

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(line))
            return
        try:
            print(line, file=self._to, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:  # a log on a full disk: what is done goes on without it
            self._quiet = True
            log.warning("progress is not shown any more: %s", why(error))

    def _panel(self, done: int, facts: Callable[[], Facts], now: float) -> Group:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._steps, completed=done, width=30)
        of = "" if self._steps is None else f" of {self._steps:,}"
        head.add_row(Text(self._title, "bold"), f"step {done:,}{of}", bar, self._times(done, now))
        body = Table.grid(padding=(0, 2))
        for width in (0, 20, 16, 20):  # so that nothing jumps when a number grows
            body.add_column(min_width=width)
        items = list(facts().items())
        for i in range(0, len(items), 3):
            cells = [Text.assemble((f"{name} ", "dim"), (value, "cyan")) for name, value in items[i : i + 3]]
            body.add_row("", *cells)
        return Group(head, body)

    def _times(self, done: int, now: float) -> str:
        spent = clock(now - self._started)
        if self._steps is None or self._first is None or done <= self._first[1]:
            return spent
        since, step = self._first
        return f"{spent}, {clock((now - since) / (done - step) * (self._steps - done))} to go"


def clock(seconds: float) -> str:
    """Return seconds as people write them.

    >>> clock(75.2), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


def figure(value: float, digits: int = 4) -> str:
    """Return a loss or a metric as text of a few characters.

    >>> figure(0.69315), figure(12345.6789), figure(1e30), figure(float("nan"))
    ('0.6932', '12345.6789', '1e+30', 'nan')
    """
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.{digits}g}"


def course(loss: Mapping[str, float]) -> str:
    """Return the losses of a run as text, from those of its first and last batch and their mean.

    >>> course({"first": 0.7, "last": 0.5, "mean": 0.6})
    '0.7000 for the first batch, 0.5000 for the last, 0.6000 on average'
    """
    first, last, mean = (figure(loss[name]) for name in ("first", "last", "mean"))
    return f"{first} for the first batch, {last} for the last, {mean} on average"


def size(count: float) -> str:
    """Return bytes as people write them.

    >>> size(512), size(3 * 2**20), size(5.5 * 2**30)
    ('512 B', '3.0 MiB', '5.5 GiB')
    """
    unit = 0
    while count >= 1024 and unit < 4:
        count /= 1024
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[unit - 1]}"


def hidden(share: float, moved: int) -> str:
    """Say how much of the movement of this many rows was hidden behind computing.

    >>> hidden(0.3, 10), hidden(0.3, 0)
    ('30% of the movement', 'no row was fetched or written: there was no movement to hide')
    """
    return f"{share:.0%} of the movement" if moved else "no row was fetched or written: there was no movement to hide"


def malformed(count: int, first: str | None) -> str:
    """Say how many rows of data files were skipped, and where the first one is.

    >>> malformed(1, "line 17 of part-3")
    '1 malformed row: line 17 of part-3'
    >>> malformed(1200, "line 17 of part-3")
    '1,200 malformed rows, the first: line 17 of part-3'
    """
    return f"1 malformed row: {first}" if count == 1 else f"{count:,} malformed rows, the first: {first}"


def listed(facts: Facts) -> str:
    """Return facts as text, one on each line.

    >>> print(listed({"loss": "0.693", "rows": "10\\nof 100"}))
      loss  0.693
      rows  10
            of 100
    """
    width = max(map(len, facts))
    lines = [f"  {name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 4)) for name, value in facts.items()]
    return "\n".join(lines)
