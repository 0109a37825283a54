"""The parts of a run that could not be written: warned of once while it runs, and listed in full at its end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")


class Missing:
    """The parts that are missing from the files in a folder. Errors in its `tried` blocks do not end the run.

    >>> missing = Missing()
    >>> for step in (10, 20):
    ...     with missing.tried("metrics.jsonl", Path("runs/a"), step):
    ...         raise OSError(28, "No space left on device")
    >>> missing.told()
    ['metrics.jsonl lacks 2 lines, of steps 10 to 20: the disk is full']
    """

    def __init__(self) -> None:
        self._parts: dict[str, tuple[list[int], str]] = {}

    @contextmanager
    def tried(
        self, what: str, where: Path | None, step: int | None = None, *, of: type[Exception] = Exception
    ) -> Iterator[None]:
        """Record an error of type `of` in this block, which writes `what` or its line of a step, instead of raising it."""
        try:
            yield
        except of as error:
            text = why(error)
            if not self._parts:
                at = what if where is None else f"{what} in {where}"
                log.warning("%s could not be written, %s. Training goes on, and its end says what is missing", at, text)
            steps, first = self._parts.setdefault(what, ([], text))
            if step is not None:
                steps[:] = [steps[0] if steps else step, step, (steps[2] if steps else 0) + 1]

    def add(self, what: str, why: str) -> None:
        """Record a part as missing without a failed attempt to write it."""
        log.warning("%s is missing: %s", what, why)
        self._parts[what] = ([], why)

    def told(self) -> list[str]:
        """Return a sentence for each incomplete part."""
        lines = []
        for what, (steps, text) in self._parts.items():
            if not steps:
                lines.append(f"{what} is missing: {text}")
            elif steps[2] == 1:
                lines.append(f"{what} lacks the line of step {steps[0]:,}: {text}")
            else:
                lines.append(f"{what} lacks {steps[2]:,} lines, of steps {steps[0]:,} to {steps[1]:,}: {text}")
        return lines
