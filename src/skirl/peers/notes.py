"""Messages that ranks leave for each other in the job's store. Every call has a time limit, whoever serves the store."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
ENDED, LOST = "skirl/ended", "skirl/lost"
"""Keys: why the job ends, and, with a rank, that this rank is alive and lost another one."""
LIMIT = 1.0
"""Seconds within which the store answers if its process runs."""


class Notes:
    """Messages between ranks about the end of the job.

    torch has no time limit for a call to a store whose process is stopped or cut off. So each call has a thread here, which
    is abandoned when the time is over.

    >>> class Silent:
    ...     def check(self, keys):
    ...         threading.Event().wait(5)
    >>> notes = Notes(Silent(), lambda: True, limit=0.05)
    >>> notes.why(), notes.answers, notes.why()
    (None, False, None)
    """

    def __init__(self, store: Any, there: Callable[[], bool], limit: float = LIMIT) -> None:
        self.answers = True
        """True if the store has answered every call so far."""
        self._store, self._there, self._limit = store, there, limit

    def why(self) -> str | None:
        """Return why the job ends, as a rank has said. None if none has, or the store does not answer."""
        return self._asked(lambda: self._store.get(ENDED).decode() if self._store.check([ENDED]) else None)

    def end(self, why: str) -> str:
        """Say why the job ends, unless another rank has. Return the sentence of the first."""
        return self._asked(lambda: self._store.compare_set(ENDED, "", why).decode()) or why

    def here(self, rank: int) -> None:
        """Say that a rank is alive, and has waited for others."""
        self._asked(lambda: self._store.set(f"{LOST}/{rank}", "here"))

    def is_here(self, rank: int) -> bool:
        """Return whether a rank has said that it is alive."""
        return bool(self._asked(lambda: self._store.check([f"{LOST}/{rank}"])))

    def _asked(self, ask: Callable[[], T]) -> T | None:
        if not (self.answers and self._there()):
            self.answers = False
            return None
        found: list[T] = []

        def work() -> None:
            try:
                found.append(ask())
            except Exception:
                self.answers = False

        thread = threading.Thread(target=work, name="skirl word", daemon=True)
        thread.start()
        thread.join(self._limit)
        if thread.is_alive():
            self.answers = False
            return None
        return found[0] if found else None
