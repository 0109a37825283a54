"""MIN and LRU counted on a trace by obvious code that knows nothing of skirl.

The bench of row traffic sets these counts beside those of an executed run. So this file imports nothing of skirl and
shares no idea with its planner: no slots, no heap, no lists, only an array of the resident rows that is cut back to the
capacity after each batch. That costs a pass over the residents a batch: 0.4 ms a batch at 31,489 rows, where the planner
pays for the batch alone. A heap would be faster in small batches, but its stale entries are what one gets wrong.

The rule of both: the trace is cut into batches (a last shorter one is dropped), and the distinct rows of a batch are
resident together. What is over the capacity then leaves, from among the rows outside the batch: MIN lets go of those
whose next batch is farthest, LRU of those whose last position in the trace is oldest. To bring a row in for the first
time is no fetch. To bring it in again is one.

>>> trace = np.array([1, 2, 1, 3, 1, 2, 3, 1])
>>> minimum(trace, batch=2, capacity=2), least_recent(trace, batch=2, capacity=2)
(2, 2)
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def minimum(trace: Array, batch: int, capacity: int) -> int:
    """Rows that batch-level Belady MIN brings in again."""
    rows = _batches(trace, batch)
    following = np.full(rows.max(initial=-1) + 1, len(rows))  # the row's next batch; `len(rows)`: never again
    worth = np.empty(rows.shape, np.int64)
    for t in range(len(rows) - 1, -1, -1):
        worth[t] = -following[rows[t]]
        following[rows[t]] = t
    return _refetches(rows, worth, capacity)


def least_recent(trace: Array, batch: int, capacity: int) -> int:
    """Rows that batch-level LRU brings in again."""
    rows = _batches(trace, batch)
    return _refetches(rows, np.arange(rows.size).reshape(rows.shape), capacity)


def _batches(trace: Array, batch: int) -> Array:
    """The trace as [batches, batch] with its ids numbered 0, 1, 2, ..."""
    whole = len(trace) // batch
    _, rows = np.unique(trace[: whole * batch], return_inverse=True)
    return rows.reshape(whole, batch)


def _refetches(rows: Array, worth: Array, capacity: int) -> int:
    """Count the fetches when each batch keeps the resident rows of greatest worth; `worth` is that after each access."""
    many = rows.max(initial=-1) + 1
    seen = np.zeros(many, bool)
    resident = np.zeros(many, bool)
    value = np.zeros(many, np.int64)
    held = np.empty(0, np.int64)  # the resident rows, listed
    fetches = 0
    for t, (ids, gained) in enumerate(zip(rows, worth, strict=True)):
        now = np.unique(ids)
        if len(now) > capacity:
            raise ValueError(f"batch {t} has {len(now)} distinct rows, capacity is {capacity}")
        fetches += int(np.count_nonzero(seen[now] & ~resident[now]))
        seen[now] = True
        value[ids] = gained  # a row that comes twice in the batch keeps the value of the last
        resident[held] = False
        resident[now] = True
        others = held[~resident[held]]
        room = capacity - len(now)
        if len(others) > room:
            others = others[np.argpartition(-value[others], room - 1)[:room]] if room else others[:0]
        held = np.concatenate([now, others])
        resident[others] = True
    return fetches
