"""The interface of an eviction policy: which resident rows leave when a batch needs room. It sees slots, never keys."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from skirl.oracle.policies.compared import LFU, LRU, TTL
from skirl.oracle.policies.minimum import Minimum


class Policy(Protocol):
    wants_last: bool
    """True if `used` needs the last batch of the window that uses each row."""

    def entered(self, slots: np.ndarray, number: int) -> None:
        """Batch `number` entered the window. These resident rows, whose next use was unknown, have one now."""
        ...

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """Return at least `count` slots whose rows leave for batch `number`, none of those in `batch` (< 0: none)."""
        ...

    def used(self, slots: np.ndarray, next_uses: np.ndarray, number: int, last: np.ndarray | None) -> None:
        """Batch `number` was planned and used these rows, in this order of recency. `last` is None unless wanted."""
        ...


POLICIES: dict[str, Callable[[int, int], Policy]] = {"lfu": LFU, "lru": LRU, "min": Minimum, "ttl": TTL}
"""By name. Each takes the number of slots, and the depth of the window."""
