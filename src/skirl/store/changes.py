"""Track which records have changed since the last checkpoint, and copy those that change again before they are written.

This takes one byte per record, plus up to `MOST_ASIDE` bytes of copies and those of one step.
"""

import threading
import time
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Rows
from skirl.tools.jit import kernel

DIRTY, OWED = 1, 2  # there are no other flags, so `&= DIRTY` drops OWED; ~OWED is no uint8 in plain Python
MOST_ASIDE = 32 << 20
_PIECE = 1 << 20  # bytes of records taken at a time, while threads that change records wait
_PIECE_AWAY = 16 << 20  # for records elsewhere: nobody waits for the copy, but each piece queues behind the GPU's work
_SCAN = 1 << 16  # flags scanned at a time


@kernel
def _freeze(flags, key_of, everything):
    """Mark changed records, or all, as owed and no longer changed. Return how many are owed."""
    n = 0
    for i in range(key_of.size):
        owed = key_of[i] >= 0 and (everything or flags[i] & DIRTY)
        flags[i] = OWED if owed else 0
        n += owed
    return n


@kernel
def _mark(flags, places):
    for place in places:
        flags[place] |= DIRTY


class Away(Protocol):
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    itemsize: int
    nbytes: int

    def copy(self, places: NDArray[np.int32]) -> Any:
        """Copy the records at these places as they are now, unaffected by later changes; `landed` waits for the copy."""
        ...


Records = Rows | Away
Taken = tuple[NDArray[np.int64], NDArray[Any]]
_Kept = tuple[NDArray[np.int64], Any]


def _copied(flags: NDArray[np.uint8], owed: NDArray, key_of: NDArray[np.int64], rows: Records) -> _Kept:
    """Copy the owed records at these places, with their keys. They are no longer owed."""
    flags[owed] &= DIRTY
    return key_of[owed], rows.take(owed, 0) if isinstance(rows, np.ndarray) else rows.copy(owed.astype(np.int32))


class Changes:
    """Tracks which records of one array have changed. The array may move as it grows, so the caller passes it each time.

    A record is *owed* from `freeze` until `take` has returned the version that was frozen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._owed = 0
        self._from = 0
        self._aside: list[_Kept] = []
        self._aside_bytes = 0
        self.waited = 0.0

    def wait_for_room(self) -> None:
        """Wait until more records may be set aside. The caller must not hold anything that the writer needs."""
        if self._aside_bytes > MOST_ASIDE:
            began = time.perf_counter()
            with self._lock:
                self._changed.wait_for(lambda: self._aside_bytes <= MOST_ASIDE)
            self.waited += time.perf_counter() - began

    def changing(self, flags: NDArray[np.uint8], places: NDArray, key_of: NDArray[np.int64], rows: Records) -> None:
        """Set aside the owed versions of records that are about to change. Call it before every change."""
        with self._lock:
            if self._owed and len(owed := places[flags[places] & OWED > 0]):
                keys, out = _copied(flags, owed, key_of, rows)
                self._aside.append((keys, out))
                self._aside_bytes += keys.nbytes + out.nbytes
            _mark(flags, places)

    def freeze(self, flags: NDArray[np.uint8], key_of: NDArray[np.int64], *, everything: bool) -> None:
        """Mark what has changed since the last call, or everything, as owed as it is now."""
        with self._lock:
            assert not self._owed, "frozen twice"
            self._owed, self._from = int(_freeze(flags[: key_of.size], key_of, everything)), 0

    def take(self, flags: NDArray[np.uint8], key_of: NDArray[np.int64], rows: Records) -> Taken | None:
        """Return keys and rows of some owed records, or None if there are no more."""
        kept = self._take(flags, key_of, rows)
        if kept is None:
            return None
        keys, out = kept
        return keys, out if isinstance(out, np.ndarray) else out.landed()  # waits without the lock

    def _take(self, flags: NDArray[np.uint8], key_of: NDArray[np.int64], rows: Records) -> _Kept | None:
        piece = _PIECE if isinstance(rows, np.ndarray) else _PIECE_AWAY
        most = max(1, piece // max(1, rows.shape[1] * rows.itemsize))
        while True:
            with self._lock:
                if self._aside:
                    keys, out = self._aside.pop()
                    self._aside_bytes -= keys.nbytes + out.nbytes
                    self._owed -= keys.size
                    self._changed.notify_all()
                    return keys, out
                if not self._owed:
                    return None
                assert self._from < key_of.size, "records were changed without a call of changing"
                end = min(key_of.size, self._from + _SCAN)
                owed = (self._from + np.flatnonzero(flags[self._from : end] & OWED))[:most]
                self._from = end if len(owed) < most else int(owed[-1]) + 1
                if len(owed):
                    self._owed -= len(owed)
                    return _copied(flags, owed, key_of, rows)

    def forget(self, flags: NDArray[np.uint8]) -> None:
        """Drop all owed records, because the checkpoint was given up."""
        with self._lock:
            if self._owed:
                flags &= DIRTY
            self._owed, self._aside, self._aside_bytes = 0, [], 0
            self._changed.notify_all()
