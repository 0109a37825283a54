"""The shared bags of a bank's ids, and the bag that each row of the output comes from. Each is pooled once, behind the
output's rows, [batch * features, dim], then copied to its samples; gradients flow the other way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from skirl.tools.jit import kernel

LEAST = 1.1
"""The least ratio of a feature's ids to those of its distinct bags for which sharing pays."""


def pays(ids: int, left: int, samples: int, least: float = LEAST) -> bool:
    """Return whether it pays to share the bags of a feature. Copying a bag to a sample costs about as much as an id.

    >>> pays(100, 50, 40), pays(100, 95, 2), pays(100, 50, 60)
    (True, False, False)
    """
    return ids >= least * left and ids - left >= samples


@dataclass(slots=True)
class BankPart:
    """Some of a bank's positions, pooled separately."""

    at: list[slice]
    """Slices of the bank's positions."""
    offsets: np.ndarray
    """int32 [bags + 1]: where each bag starts among these positions."""

    def of(self, positions: np.ndarray) -> np.ndarray:
        """Return the entries of these positions from an array with an entry for each of the bank's, or an empty one."""
        if not len(positions):
            return positions
        parts = [positions[at] for at in self.at]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [positions[:0]])


@dataclass(slots=True)
class Shared:
    """The features of a bank whose samples share bags, and its other features, which are plain."""

    batch: int
    features: int
    columns: np.ndarray
    """int32 [shared]: the features whose bags are shared, ascending."""
    bag: np.ndarray
    """int32 [batch, shared]: the bag of each sample, as an index into all shared bags of the bank."""
    begins: np.ndarray
    """int32 [shared + 1]: each shared feature's first bag among all shared bags."""
    first: np.ndarray
    """int64 [features + 1]: each feature's first bag among all of the bank's, as in `BankIds.offsets`."""
    inverse: list[np.ndarray | None]
    """By feature: int32 [batch], the bag of each sample among the feature's; None if it is plain."""
    parts: tuple[BankPart, BankPart] | None = None
    """The positions of plain features, and those of shared bags. The first part has a bag for every feature and sample,
    empty if the feature is shared."""

    @classmethod
    def of(cls, inverse: list[np.ndarray | None], sizes: Sequence[int], batch: int) -> "Shared":
        """Build from the features of a bank."""
        columns = [f for f, each in enumerate(inverse) if each is not None]
        begins = np.concatenate([[0], np.cumsum([sizes[f] for f in columns])]).astype(np.int32)
        bag = np.empty((batch, len(columns)), np.int32)
        for i, f in enumerate(columns):
            bag[:, i] = inverse[f] + begins[i]
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(batch, len(sizes), np.array(columns, np.int32), bag, begins, first, inverse)

    @property
    def bags(self) -> int:
        """Number of shared bags."""
        return int(self.begins[-1])

    @property
    def samples(self) -> int:
        """Number of the output's rows for samples: one for each sample and feature."""
        return self.batch * self.features

    @property
    def rows(self) -> int:
        """Number of all rows of the output: those for samples, then the shared bags."""
        return self.samples + self.bags

    @property
    def plain(self) -> np.ndarray:
        """bool [features]: whether each feature is plain."""
        return np.array([each is None for each in self.inverse], np.bool_)

    def by_bag(self, mask: np.ndarray) -> np.ndarray:
        """Spread a value per feature over all rows. Rows of samples that are copies of a shared bag get False."""
        behind = np.repeat(mask[self.columns], np.diff(self.begins))
        return np.concatenate([np.tile(mask & self.plain, self.batch), behind])

    def fill(
        self, starts: np.ndarray, weights: np.ndarray, first: np.ndarray, mean: np.ndarray, offsets: np.ndarray,
        bag_of: np.ndarray, scale: np.ndarray,
    ) -> None:  # fmt: skip
        """Find the bags of all positions, and set `parts`."""
        row, step = np.arange(self.features, dtype=np.int64), np.full(self.features, self.features, np.int64)
        row[self.columns], step[self.columns] = self.samples + self.begins[:-1], 1
        plain, once = np.zeros(self.samples + 1, np.int32), np.zeros(self.bags + 1, np.int32)
        _bags(
            starts, weights, first, np.diff(self.first), row, step, mean, self.plain, self.batch, offsets, bag_of, scale,
            plain, once,
        )  # fmt: skip
        ends = offsets[self.first].tolist()
        at = [slice(low, high) for low, high in pairwise(ends)]
        self.parts = (
            BankPart([of for of, each in zip(at, self.inverse) if each is None], plain),
            BankPart([of for of, each in zip(at, self.inverse) if each is not None], once),
        )


@kernel
def _bags(
    starts, weights, first, sizes, row, step, mean, is_plain, batch, offsets, bag_of, scale, of_plain, of_shared
):  # fmt: skip
    """Fill offsets, bag_of and scale, and the offsets of both parts, which must be zeros.

    row, step: the output row of each feature's first bag, and the distance from one bag's row to the next.
    """
    one = weights.dtype.type(1)
    n = bags = plain = shared = at = 0
    offsets[0] = 0
    for f in range(len(first)):
        if not is_plain[f]:
            of_plain[f * batch + 1 : (f + 1) * batch + 1] = plain
        for b in range(sizes[f]):
            begin, end = starts[first[f] + b], starts[first[f] + b + 1]
            count = weights.dtype.type(end - begin)
            for p in range(begin, end):
                bag_of[n] = row[f] + b * step[f]
                if len(scale):
                    factor = weights[p] if len(weights) else one
                    scale[n] = factor / count if mean[f] else factor
                n += 1
            if is_plain[f]:
                plain += end - begin
                of_plain[f * batch + b + 1] = plain
            else:
                shared += end - begin
                at += 1
                of_shared[at] = shared
            bags += 1
            offsets[bags] = n


@kernel
def gather(values, starts, bags, out):
    """Copy the values of some bags, one bag after the other."""
    at = np.uint64(0)  # indices that need no check for negative ones: so the copy takes several values at a time
    for bag in bags:
        begin = np.uint64(starts[bag])
        count = np.uint64(starts[bag + 1]) - begin
        for i in range(count):
            out[at + i] = values[begin + i]
        at += count
