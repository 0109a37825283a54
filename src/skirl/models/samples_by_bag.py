"""Samples by bag, for loops that take the ids of a bag once and compute with them for one sample after the other."""

from typing import NamedTuple

import numpy as np

from skirl.core.once import Distinct

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
    def of(cls, bags: Distinct) -> "SamplesByBag":
        """Sort the samples of a batch by bag."""
        offsets, inverse = bags.offsets.numpy(), bags.inverse.numpy()
        begins, ends = offsets[:-1], offsets[1:]
        first = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=bags.bags))])
        longest = int((ends - begins).max(initial=0))
        return cls(begins, ends, first, np.argsort(inverse, kind="stable"), -(-longest // TILE) * TILE)
