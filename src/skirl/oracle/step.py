"""The Step: everything that happens to one bank's rows for one training step, decided when its batch was planned.

Fetch, compute and write-back read it and look nothing up.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Step:
    """One step of one bank. Order of execution: evict, forward, put fetched rows, make new rows, compute."""

    number: int
    """Counts the steps of the lookahead that planned it, from 0."""

    slots: np.ndarray
    """int32 [ids]: the slot of every id position."""
    keys: np.ndarray
    """int64 [rows]: the distinct rows, by table, and in each by their last position."""
    rows: np.ndarray
    """int32 [rows]: their slots."""
    group_start: np.ndarray
    """int32 [rows + 1]: where each distinct row's positions begin in `group_pos`."""
    group_pos: np.ndarray
    """int32 [ids]: positions grouped by distinct row, ascending in each group, so that backward needs no sort."""

    evict_keys: np.ndarray
    """int64: rows that leave before this step computes; they are written back."""
    evict_slots: np.ndarray
    """int32: the slots they leave."""
    fetch_keys: np.ndarray
    """int64: rows to read from the store."""
    fetch_slots: np.ndarray
    """int32: the slots they go to."""
    fetch_after: int
    """The read may start when the write-backs of all steps up to this one are in the store; -1: at once."""
    forward_step: np.ndarray
    """int64: rows fetched out of a pending write-back: the step that evicted each,"""
    forward_index: np.ndarray
    """int32: its place in that step's `evict_keys`,"""
    forward_slots: np.ndarray
    """int32: and the slot it goes to."""
    forward_keys: np.ndarray
    """int64: their keys."""
    new_keys: np.ndarray
    """int64: rows used for the first time ever; made on the device."""
    new_slots: np.ndarray
    """int32: the slots they go to."""
    hold_from: int
    """Evicted rows of steps before this one are not forwarded any more: their buffers may be reused once written."""

    @property
    def fetches(self) -> int:
        """Rows brought in again: read from the store or forwarded out of a pending write-back."""
        return len(self.fetch_keys) + len(self.forward_keys)

    def count_from(self, first: int) -> None:
        """Count steps from `first` and not from 0."""
        self.number += first
        self.fetch_after += first
        self.forward_step += first
        self.hold_from += first
