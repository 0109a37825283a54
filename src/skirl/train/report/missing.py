"""What of a run could not be written down: told once while it runs, and in full at its end."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skirl.tools.os_errors import why

log = logging.getLogger("skirl")


class Missing:
    """Keeps what is missing of the files in one folder; nothing in its blocks ends a run.

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
        """In this block `what` is written, its line of a step or all of it; an error of this type ends no run."""
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
        """This is missing, as was found and not tried.

        **Arguments**

        - `what`: a part.
        - `why`: of it, in words.
        """
        log.warning("%s is missing: %s", what, why)
        self._parts[what] = ([], why)

    def told(self) -> list[str]:
        """A sentence for each part that something is missing of."""
        lines = []
        for what, (steps, text) in self._parts.items():
            if not steps:
                lines.append(f"{what} is missing: {text}")
            elif steps[2] == 1:
                lines.append(f"{what} lacks the line of step {steps[0]:,}: {text}")
            else:
                lines.append(f"{what} lacks {steps[2]:,} lines, of steps {steps[0]:,} to {steps[1]:,}: {text}")
        return lines
