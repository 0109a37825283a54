"""Progress of a loop: lines that stay in place on a terminal, a line every few seconds anywhere else."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from skirl.tools.os_errors import why
from skirl.tools.progress import Facts
from skirl.tools.units import clock

log = logging.getLogger("skirl")
ON_TERMINAL, ELSEWHERE = 0.2, 3.0
"""Seconds between two updates."""


class Progress:
    """Shows the progress of a loop: use it in a with-block, and call it once per step."""

    def __init__(self, to: TextIO, title: str, steps: int | None = None, begun: str = "") -> None:
        self._to, self._title, self._steps, self._begun = to, title, steps, begun
        console = Console(file=to)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._started, self._due, self._shown, self._full = time.monotonic(), 0.0, -1, False
        self._last: tuple[int, Callable[[], Facts]] | None = None

    def __call__(self, done: int, facts: Callable[[], Facts]) -> None:
        """Report that `done` steps are done. `facts` returns what else to show; it is called only when it is shown."""
        if self._begun:
            self._print(self._begun)
            self._begun = ""
        self._last = (done, facts)
        if time.monotonic() >= self._due:
            self._show()

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
                self._show()
        finally:
            if self._live is not None:
                self._live.stop()

    def _show(self) -> None:
        assert self._last is not None
        self._shown, facts = self._last
        text, spent = " · ".join(f"{name} {value}" for name, value in facts().items()), time.monotonic() - self._started
        self._due = time.monotonic() + (ELSEWHERE if self._live is None else ON_TERMINAL)
        if self._live is None:
            self._print(f"{self._title} {self._shown}{'' if self._steps is None else f'/{self._steps}'} · {text}")
            return
        of = "" if self._steps is None else f" of {self._steps:,}"
        left = clock(spent / max(1, self._shown) * (self._steps - self._shown)) if self._steps else "?"
        head = f"{self._title}  step {self._shown:,}{of}  {clock(spent)}, {left} to go"
        self._live.update(Text.assemble((head, "bold"), f"\n{text}"), refresh=True)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(line))
        elif not self._full:
            try:
                print(line, file=self._to, flush=True)
            except OSError as error:  # a log on a full disk: what is done goes on without it
                if isinstance(error, BrokenPipeError):
                    raise
                self._full = True
                log.warning("progress is not shown any more: %s", why(error))
