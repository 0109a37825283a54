"""The Step: everything that happens to one bank's rows in one training step, decided when its batch was planned."""

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Step:
    """One step of one bank. Order of execution: evict, forward, put fetched rows, make new rows, compute."""

    number: int
    """Number of the step in its pass, from 0."""

    slots: np.ndarray
    """int32 [ids]: the slot of every id position."""
    keys: np.ndarray
    """int64 [rows]: the distinct rows, by table, and within a table by their last position."""
    rows: np.ndarray
    """int32 [rows]: their slots."""
    group_start: np.ndarray
    """int32 [rows + 1]: where each distinct row's positions begin in `group_pos`."""
    group_pos: np.ndarray
    """int32 [ids]: positions grouped by distinct row, ascending in each group, so that backward needs no sort."""

    evict_keys: np.ndarray
    """int64: rows that leave before this step computes. They are written back."""
    evict_slots: np.ndarray
    fetch_keys: np.ndarray
    """int64: rows to read from the store."""
    fetch_slots: np.ndarray
    fetch_after: int
    """The read may start once the write-backs of all steps up to this one are in the store; -1: at once."""
    forward_step: np.ndarray
    """int64: for rows taken from a pending write-back, the step that evicted each."""
    forward_index: np.ndarray
    """int32: the index of each in that step's `evict_keys`."""
    forward_slots: np.ndarray
    forward_keys: np.ndarray
    new_keys: np.ndarray
    """int64: rows used for the first time ever. They are made on the device."""
    new_slots: np.ndarray
    hold_from: int
    """Rows evicted by steps before this one are no longer forwarded: their buffers may be reused once written."""

    @property
    def nbytes(self) -> int:
        arrays = [getattr(self, name) for name in self.__slots__]
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    @property
    def fetches(self) -> int:
        """Number of rows refetched: read from the store, or forwarded from a pending write-back."""
        return len(self.fetch_keys) + len(self.forward_keys)
