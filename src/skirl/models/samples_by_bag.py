"""Samples by bag, for loops that take the ids of a bag once and compute with them for one sample after the other."""

from typing import NamedTuple

import numpy as np

from skirl.core.once import Windowed
from skirl.core.stretches import Stretches

TILE = 16
"""Number of ids of a bag that are beside each other in registers."""


class SamplesByBag(NamedTuple):
    """The samples of each bag, and where the ids of each bag are."""

    begins: np.ndarray
    """int64 [bags]: where the ids of each bag begin,"""
    ends: np.ndarray
    """and where they end."""
    first: np.ndarray
    """int64 [bags + 1]: where the samples of each bag begin in `order`."""
    order: np.ndarray
    """int64 [batch]: the samples, by bag, those of a bag ascending."""
    wide: int
    """Ids of the longest bag, rounded up to whole tiles."""

    @classmethod
    def of(cls, bags: Windowed) -> "SamplesByBag":
        """Sort the samples of a batch by bag.

        **Arguments**

        - `bags`: gives the ids of each bag, and the bag of each sample.
        """
        begins, ends, inverse = (of.numpy() for of in (bags.begins, bags.ends, bags.inverse))
        first = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=bags.bags))])
        longest = int((ends - begins).max(initial=0))
        return cls(begins, ends, first, np.argsort(inverse, kind="stable"), -(-longest // TILE) * TILE)


def by_stretch(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort windows by the stretch of ids that they are in. Windows of two stretches share no ids.

    Returns int64 [stretches + 1], where the windows of each stretch begin, and these windows, those of a stretch ascending.

    >>> first, order = by_stretch(np.array([7, 2, 3]), np.array([8, 5, 5]))
    >>> first.tolist(), order.tolist()
    ([0, 2, 3], [1, 2, 0])
    """
    found = Stretches.of(begins, ends - begins)
    first = np.concatenate([[0], np.cumsum(np.bincount(found.which, minlength=len(found.begins)))])
    return first, np.argsort(found.which, kind="stable")
