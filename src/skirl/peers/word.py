"""Word that ranks leave for each other in the job's store: nobody waits long for it, whoever serves the store."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
ENDED, LOST = "skirl/ended", "skirl/lost"
"""Keys: why the job ends; and, of each rank, that it lost somebody and so is there itself."""
LIMIT = 1.0
"""Seconds in which the store answers, if its process runs."""


class Word:
    """What ranks say of the job's end.

    torch has no limit for a word to a process that is stopped or cut off; each has a thread here, which is left behind.

    **Arguments**

    - `store`: of the job: anything with the methods of torch.distributed.Store.
    - `there`: whether the process that serves it may live: torch prints a stack for each word to one that is gone.
    - `limit`: seconds for an answer; after a longer one no more is asked.

    >>> class Silent:
    ...     def check(self, keys):
    ...         threading.Event().wait(5)
    >>> word = Word(Silent(), lambda: True, limit=0.05)
    >>> word.why(), word.answers, word.why()
    (None, False, None)
    """

    def __init__(self, store: Any, there: Callable[[], bool], limit: float = LIMIT) -> None:
        self.answers = True
        """Whether the store has answered so far."""
        self._store, self._there, self._limit = store, there, limit

    def why(self) -> str | None:
        """Why the job ends, as a rank has said; None where none has, or nobody can be asked."""
        return self._asked(lambda: self._store.get(ENDED).decode() if self._store.check([ENDED]) else None)

    def end(self, why: str) -> str:
        """Say why the job ends; the sentence of whoever was first.

        **Arguments**

        - `why`: the sentence.
        """
        return self._asked(lambda: self._store.compare_set(ENDED, "", why).decode()) or why

    def here(self, rank: int) -> None:
        """Say that a rank is there, and waited for others.

        **Arguments**

        - `rank`: this one.
        """
        self._asked(lambda: self._store.set(f"{LOST}/{rank}", "here"))

    def is_here(self, rank: int) -> bool:
        """Whether a rank has said so.

        **Arguments**

        - `rank`: another one.
        """
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
