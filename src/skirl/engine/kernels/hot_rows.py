"""Stretches: the order of summation cuts a row's positions every STRETCH, so that a GPU can sum a hot row in parts.

Each stretch is summed from zero in order, then the stretches' sums are added to zero in order. A row of up to STRETCH
positions has one stretch, and so the bits of a plain sum. 256: of Criteo's rows in a batch of 8,192 some hundreds have more,
and 256 positions one after the other take a GPU some 20 us. Shorter stretches would change the bits of more rows and leave
more partial sums to write; without any, a row of 20,000 positions would take a GPU milliseconds.
"""

import numpy as np

from skirl.tools.jit import kernel

STRETCH = 256


@kernel
def stretches_of(group_start):
    """All stretches of the rows that have more than one: int32 [m, 3], each (row, first, last place in group_pos).

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
