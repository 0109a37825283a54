"""The rows that are on the device after the last executed step, for evaluation, checkpoints and the next planner."""

from collections.abc import Sequence

import numpy as np

from skirl.oracle.bank import Resident
from skirl.store.changes import Changes, Records
from skirl.tools.jit import kernel


class Cache:
    """The slots of one bank, and the rows that they held after the last executed step, 18 bytes a slot."""

    def __init__(self, records: Records) -> None:
        self.records = records
        slots = records.shape[0]
        self.key_of = np.full(slots, -1, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.flags = np.zeros(slots, np.uint8)
        self.changes = Changes()
        """Records changed since the last checkpoint, for the next one."""
        self._unwritten = np.zeros(slots, np.bool_)
        self._clock = 1
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.key_of)

    @property
    def filled(self) -> int:
        return int((self.key_of >= 0).sum())

    @property
    def unwritten(self) -> np.ndarray:
        """The slots with rows that the store lacks, or has as they were before a change."""
        return np.flatnonzero(self._unwritten & (self.key_of >= 0))

    def written(self, slots: np.ndarray) -> None:
        _set(self._unwritten, slots, False)

    def changing(self, slots: np.ndarray, stored: bool = False) -> None:
        """Announce that rows of these slots are about to change, or to be replaced: by what the store has, if `stored`."""
        _set(self._unwritten, slots, not stored)
        self.changes.wait_for_room()
        self.changes.changing(self.flags, slots, self.key_of, self.records)

    def record(self, left: np.ndarray, came: Sequence[tuple[np.ndarray, np.ndarray, bool]], rows: np.ndarray) -> None:
        """Record an executed step: it emptied the slots `left`, filled `came` (keys, slots, and whether the store has
        or gets all these rows as they came), and used `rows` in order."""
        _set(self.key_of, left, -1)
        for keys, slots, stored in came:
            _fill(self.key_of, keys, slots)
            # A row that comes back may differ from what an earlier checkpoint saw in the cache.
            self.changing(slots, stored)
        _use(self.used, rows, self._clock)
        self._clock += len(rows)
        self._sorted = None

    def resident(self) -> Resident:
        slots = np.flatnonzero(self.key_of >= 0)
        slots = slots[np.argsort(self.used[slots], kind="stable")].astype(np.int32)
        return Resident(self.key_of[slots], slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the slot of each key, -1 if it is not resident."""
        if self._sorted is None:
            slots = np.flatnonzero(self.key_of >= 0)
            order = np.argsort(self.key_of[slots])
            self._sorted = self.key_of[slots][order], slots[order]
        held, slots = self._sorted
        if not len(held):
            return np.full(len(keys), -1, np.int64)
        place = np.minimum(np.searchsorted(held, keys), len(held) - 1)
        return np.where(held[place] == keys, slots[place], -1)


# Kernels, because numpy holds the GIL while it indexes: 0.26 ms per step of 18,000 rows, in which no stage moved.


@kernel
def _set(of, slots, value):
    for slot in slots:
        of[slot] = value


@kernel
def _fill(key_of, keys, slots):
    for i in range(slots.size):
        key_of[slots[i]] = keys[i]


@kernel
def _use(used, slots, clock):
    for i in range(slots.size):
        used[slots[i]] = clock + i
