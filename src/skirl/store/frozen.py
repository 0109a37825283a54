"""Rows of a store at one moment: on their way to files, and as parts of what a store takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Facts = dict[str, Any]
"""What JSON can say: of frozen rows, which files hold them."""

Mine = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Which of some keys are one's own."""


class Frozen(ABC):
    """The rows of a store as they were at one moment, to be written while they change."""

    @abstractmethod
    def write(self) -> Facts:
        """Write them and wait until they last; meant for a thread of its own. Gives what `Store.thaw` needs."""

    @abstractmethod
    def release(self) -> None:
        """Called when they are written or given up. The store can be used as before, even if this fails."""


@dataclass(frozen=True)
class Part:
    """Frozen rows to take.

    **Arguments**

    - `facts`: what `Frozen.write` gave.
    - `over`: keys and rows that replace the frozen ones: those that were in the cache.
    - `mine`: which of the keys to take; None: all, so that files can be shared instead of read.
    """

    facts: Facts
    over: Iterable[tuple[NDArray[np.int64], Any]] = ()
    mine: Mine | None = None

    def own(self, pairs: Iterable[tuple[NDArray[np.int64], Any]]) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Those of some keys and rows that are to be taken."""
        for keys, rows in pairs:
            if self.mine is None:
                yield keys, rows
            elif (here := self.mine(keys)).any():
                yield keys[here], rows[here]
