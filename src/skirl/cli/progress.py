"""Progress of a loop: a panel that stays in place on a terminal, a line every few seconds anywhere else."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skirl.tools.os_errors import why
from skirl.tools.progress import Facts
from skirl.tools.units import clock

log = logging.getLogger("skirl")

ON_TERMINAL = 0.2
"""Seconds between two updates of the panel."""
ELSEWHERE = 3.0
"""Seconds between two lines."""


class Progress:
    """Shows the progress of a loop: use it in a with-block, and call it once per step.

    >>> import sys
    >>> with Progress(sys.stdout, "train", 2) as progress:
    ...     for done in (1, 2):
    ...         progress(done, lambda: {"loss": "0.693"})
    train 1/2 · loss 0.693
    train 2/2 · loss 0.693
    """

    def __init__(self, to: TextIO, title: str, steps: int | None = None, begun: str = "") -> None:
        self._to, self._title, self._steps, self._begun = to, title, steps, begun
        self._quiet = False
        console = Console(file=to)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
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
