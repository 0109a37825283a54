"""BagPipe's rule, for comparison: a row stays until the last batch of the window that uses it, its time to live.

As in BagPipe, the time to live is set when a batch that uses the row is planned, from the window of that moment, and a later
batch that enters the window does not lengthen it. Expired rows leave at a clean-up every quarter of the window, needed room
or not. BagPipe's release has no answer when the rows alive do not fit; here those leave then whose time to live ends last,
since they block room longest. To lengthen it as batches enter would fetch less, and would be neither BagPipe nor MIN.
"""

import numpy as np

from skirl.oracle.entries import Entries
from skirl.oracle.smallest import smallest

_EXPIRED = 1 << 40


class TTL:
    """Expired rows leave at every clean-up; when room is short, expired rows and then those that live longest."""

    def __init__(self, entries: Entries, depth: int) -> None:
        self._entries = entries
        self._interval = max(1, depth // 4)
        self._until = np.full(entries.size, -1, np.int64)

    def entered(self, entries: np.ndarray, number: int) -> None:
        """The time to live is set by `used`."""

    def evict(self, count: int, batch: np.ndarray, number: int) -> np.ndarray:
        """All expired rows at a clean-up; otherwise as many as are needed."""
        cleans = number % self._interval == 0
        if not count and not cleans:
            return np.empty(0, np.int32)
        self._fit()
        columns = self._entries.columns
        resident = columns.slot >= 0
        resident[batch] = False
        candidates = np.flatnonzero(resident)
        until = self._until[candidates]
        expired = until < number
        if cleans:
            count = max(count, int(expired.sum()))
        worth = np.where(expired, until - _EXPIRED, -until)
        return candidates[smallest(count, worth, columns.clock[candidates])].astype(np.int32)

    def used(self, entries: np.ndarray, next_uses: np.ndarray, number: int) -> None:
        """These rows live until the last batch of the window, as it is now, that uses them."""
        self._fit()
        self._until[entries] = self._entries.columns.last_batch[entries]

    def _fit(self) -> None:
        if len(self._until) < self._entries.size:
            grown = np.full(self._entries.size, -1, np.int64)
            grown[: len(self._until)] = self._until
            self._until = grown
