"""Frozen rows: the rows of a store at one moment, to be written to files and taken by a store again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Facts = dict[str, Any]
"""JSON-compatible facts about frozen rows, such as the files that hold them."""

Mine = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Returns a mask of the keys that belong to the caller."""


class Frozen(ABC):
    """The rows of a store as they were at one moment, which can be written while the store goes on changing."""

    @abstractmethod
    def write(self) -> Facts:
        """Write the rows, wait until they are durable, and return what `Store.thaw` needs. Meant for its own thread."""

    @abstractmethod
    def release(self) -> None:
        """Free the frozen state, once it is written or given up. The store works as before even if this fails."""


@dataclass(frozen=True)
class FrozenPart:
    """Frozen rows for a store to take."""

    facts: Facts
    over: Iterable[tuple[NDArray[np.int64], Any]] = ()
    mine: Mine | None = None

    def own(self, pairs: Iterable[tuple[NDArray[np.int64], Any]]) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Yield those of the keys and rows that are to be taken."""
        for keys, rows in pairs:
            if self.mine is None:
                yield keys, rows
            elif (here := self.mine(keys)).any():
                yield keys[here], rows[here]
