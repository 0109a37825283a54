"""Which rows are on the device: by slot, not by key.

The mirror of what is resident after the last executed step is for what must see the executed state: evaluation,
checkpoints, and the next planner. It takes 17 bytes a slot on the host.
"""

from collections.abc import Sequence

import numpy as np

from skirl.oracle.bank import Resident
from skirl.store.changes import Changes, Records
from skirl.tools.jit import kernel


class Cache:
    """The slots of one bank, and which rows they held after the last executed step."""

    def __init__(self, records: Records) -> None:
        self.records = records
        slots = records.shape[0]
        self.key_of = np.full(slots, -1, np.int64)
        self.used = np.zeros(slots, np.int64)
        self.flags = np.zeros(slots, np.uint8)
        self.changes = Changes()
        """Of the next checkpoint."""
        self._clock = 1
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.key_of)

    @property
    def filled(self) -> int:
        """Slots that hold a row."""
        return int((self.key_of >= 0).sum())

    def changing(self, slots: np.ndarray) -> None:
        """Rows of these slots are about to change, or to be replaced."""
        self.changes.wait_for_room()
        self.changes.changing(self.flags, slots, self.key_of, self.records)

    def record(self, left: np.ndarray, came: Sequence[tuple[np.ndarray, np.ndarray]], rows: np.ndarray) -> None:
        """A step was executed: `left` slots were emptied, `came` (keys, slots) filled, `rows` used in this order."""
        _empty(self.key_of, left)
        for keys, slots in came:
            _fill(self.key_of, keys, slots)
            self.changing(slots)  # a row that comes back is not what an earlier checkpoint had of it in the cache
        _use(self.used, rows, self._clock)
        self._clock += len(rows)
        self._sorted = None

    def resident(self) -> Resident:
        """What is resident, from the least recently used."""
        slots = np.flatnonzero(self.key_of >= 0)
        slots = slots[np.argsort(self.used[slots], kind="stable")].astype(np.int32)
        return Resident(self.key_of[slots], slots)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, -1 where it is not resident."""
        if self._sorted is None:
            slots = np.flatnonzero(self.key_of >= 0)
            order = np.argsort(self.key_of[slots])
            self._sorted = self.key_of[slots][order], slots[order]
        held, slots = self._sorted
        if not len(held):
            return np.full(len(keys), -1, np.int64)
        place = np.minimum(np.searchsorted(held, keys), len(held) - 1)
        return np.where(held[place] == keys, slots[place], -1)


# Kernels, because numpy indexes while it holds the interpreter: 0.26 ms a step of 18,000 rows, in which no stage moved.


@kernel
def _empty(key_of, slots):
    for slot in slots:
        key_of[slot] = -1


@kernel
def _fill(key_of, keys, slots):
    for i in range(slots.size):
        key_of[slots[i]] = keys[i]


@kernel
def _use(used, slots, clock):
    for i in range(slots.size):
        used[slots[i]] = clock + i
