"""Stretches of ids: the fewest that hold some windows, each id once."""

from typing import NamedTuple

import numpy as np

from skirl.tools.jit import kernel, read_only


class Stretches(NamedTuple):
    """The fewest ids that hold some windows: stretches of overlapping windows, in the order of the ids.

    >>> found = Stretches.of(np.array([7, 2, 3]), np.array([1, 3, 2]))
    >>> found.begins.tolist(), found.ends.tolist(), found.which.tolist(), found.places.tolist()
    ([2, 7], [5, 8], [1, 0, 0], [3, 0, 1])
    """

    begins: np.ndarray
    """int64 [stretches]: where each begins,"""
    ends: np.ndarray
    """and where it ends."""
    which: np.ndarray
    """int64 [windows]: the stretch of each window."""
    places: np.ndarray
    """int64 [windows]: where each window begins once the stretches are put one behind the other."""

    @classmethod
    def of(cls, begins: np.ndarray, lengths: np.ndarray) -> "Stretches":
        """Find the stretches of windows, which may be in any order.

        **Arguments**

        - `begins`, `lengths`: int64, of each window.
        """
        order = np.argsort(begins, kind="stable")
        low, high, which, places = (np.empty(len(order), np.int64) for _ in range(4))
        count = _sweep(read_only(begins), read_only(lengths), order, low, high, which, places)
        return cls(low[:count], high[:count], which, places)

    @property
    def sizes(self) -> np.ndarray:
        """Number of ids of each."""
        return self.ends - self.begins

    @property
    def ids(self) -> int:
        """Number of ids of all."""
        return int(self.sizes.sum())

    def taken(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the stretches, one stretch behind the other."""
        return at_windows(values, self.begins, self.sizes)


def at_windows(values: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the values of some windows, one window behind the other.

    >>> at_windows(np.array([5, 6, 7]), np.array([1, 0]), np.array([2, 2])).tolist()
    [6, 7, 5, 6]
    """
    out = np.empty(int(lengths.sum()), values.dtype)
    gather_from(read_only(values), begins, lengths, out)
    return out


def indices(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices of the values that `at_windows` takes, int64.

    >>> indices(np.array([1, 0]), np.array([2, 2])).tolist()
    [1, 2, 0, 1]
    """
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)


@kernel
def gather_from(values, starts, sizes, out):
    """Copy the lists at `starts`, with these sizes, one after the other into `out`."""
    at = 0
    for k in range(len(starts)):
        part, own = values[starts[k] : starts[k] + sizes[k]], out[at : at + sizes[k]]  # views: no check for index < 0
        for j in range(len(part)):
            own[j] = part[j]
        at += sizes[k]


@kernel
def _sweep(begins, lengths, order, low, high, which, places):
    """Fill the stretches' begins and ends, and the stretch and the place of each window. Return the number of stretches.

    order: the windows by their begins.
    """
    last, before = -1, 0  # the current stretch, and the ids of those before it
    for window in order:
        begin, end = begins[window], begins[window] + lengths[window]
        if last < 0 or begin >= high[last]:
            before += high[last] - low[last] if last >= 0 else 0
            last += 1
            low[last], high[last] = begin, end
        high[last] = max(high[last], end)
        which[window] = last
        places[window] = before + begin - low[last]
    return last + 1
