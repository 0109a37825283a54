"""Stretches: a row's positions are summed in parts of STRETCH, so that a GPU can sum a hot row with many threads.

Each stretch is summed from zero in order, then the sums of the stretches are added to zero in order.
"""

import numpy as np

from skirl.tools.jit import kernel

STRETCH = 256
"""Positions in a stretch. A row with at most this many has the bits of a plain sum."""


@kernel
def stretches_of(group_start):
    """Return the stretches of all rows that have more than one: int32 [m, 3], each (row, first, end in group_pos).

    - `group_start`: int32 [rows + 1], where each row's positions begin in group_pos.

    >>> stretches_of(np.array([0, 256, 513], np.int32)).tolist()
    [[1, 256, 512], [1, 512, 513]]
    """
    rows = len(group_start) - 1
    m = 0
    for u in range(rows):
        count = group_start[u + 1] - group_start[u]
        if count > STRETCH:
            m += (count + STRETCH - 1) // STRETCH
    out = np.empty((m, 3), np.int32)
    m = 0
    for u in range(rows):
        last = group_start[u + 1]
        if last - group_start[u] > STRETCH:
            for first in range(group_start[u], last, STRETCH):
                out[m, 0] = u
                out[m, 1] = first
                out[m, 2] = min(first + STRETCH, last)
                m += 1
    return out
