"""The order of sums, so that a GPU can sum a hot row with many threads: a row's positions in stretches, each summed
from zero in order, then their sums from zero in order; micro-batches along a tree. The plan of both."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from skirl.tools.jit import kernel

STRETCH = 256
"""Positions in a stretch. A row with at most this many has the bits of a plain sum."""


Array = TypeVar("Array")


class Gradients(NamedTuple, Generic[Array]):
    """The gradients of bags, and those that each row gets: of its positions, ascending. Arrays, or tensors on a GPU."""

    start: Array
    """int32 [rows + 1], where each row's positions begin in `pos`."""
    pos: Array
    bag_of: Array
    """int32 [n], the row of `grads` for each position."""
    scale: Array
    """[n], or empty if all factors are 1."""
    grads: Array
    """[bags, dim]."""
    live: Array
    """bool [features], whether the feature of a bag (bag % features) has a gradient. On a GPU empty if all have one."""


def stretches_of(group_start: np.ndarray) -> np.ndarray:
    """Return the stretches of all rows that have more than one: int32 [m, 3], each (row, first, end in group_pos).

    - `group_start`: int32 [rows + 1], where each row's positions begin in group_pos.

    >>> stretches_of(np.array([0, 256, 513], np.int32)).tolist()
    [[1, 256, 512], [1, 512, 513]]
    """
    counts = np.diff(group_start)
    hot = np.flatnonzero(counts > STRETCH)
    rows = np.repeat(hot, -(-counts[hot] // STRETCH))
    first = group_start[rows] + STRETCH * (np.arange(len(rows)) - np.searchsorted(rows, rows))
    return np.stack([rows, first, np.minimum(first + STRETCH, group_start[rows + 1])], 1).astype(np.int32)


DEEPEST = 34
"""Most partial sums that a row has at once: leaves stay below 2**32."""
NOWHERE = -1
"""Leaf of positions that are left out."""


class Parts(NamedTuple):
    """Where the positions of each leaf end. The caller decides what a leaf is: a micro-batch, or a trainer's sums."""

    ends: np.ndarray
    """int64 [parts], ascending: the position after the last one of each part."""
    leaves: np.ndarray
    """int64 [parts], ascending: the leaf of each part, or its subtree's first. NOWHERE: its positions are left out."""
    times: float = 1.0
    """What an update on the CPU multiplies the sum of all parts by."""

    def within(self, block: range) -> "Parts":
        inside = (self.leaves >= block.start) & (self.leaves < block.stop)
        return self._replace(leaves=np.where(inside, self.leaves, NOWHERE))


ONE = Parts(np.array([np.iinfo(np.int64).max]), np.zeros(1, np.int64))
"""All positions are of one leaf."""


@kernel
def settled(leaf_of, height, leaf, stack):
    """Add up the partial sums that are complete before a new leaf. Return how many are left."""
    while height > 1 and meets_below(leaf_of[height - 2], leaf_of[height - 1], leaf):
        height -= 1
        for d in range(stack.shape[1]):
            stack[height - 1, d] = stack[height - 1, d] + stack[height, d]
    return height


@kernel
def meets_below(a, b, c):
    """Return whether the smallest subtree with leaves a and b is below the one with b and c, where a < b < c.

    >>> meets_below(0, 1, 2), meets_below(1, 2, 3)
    (True, False)
    """
    near, far = a ^ b, b ^ c
    return near < far and near < near ^ far  # the highest bit of near is below that of far


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The additions for all rows of a step."""

    stretches: np.ndarray
    """int32 [m, 3], each (row, first, end in group_pos). The u-th is the first one of row u, and receives its sum."""
    runs: np.ndarray
    """int32 [r, 3], each (to, begin, length): the sums of `length` stretches from `begin` are added to that of `to`."""
    rounds: tuple[int, ...]
    """Where each round begins in `runs`, and where the last one ends."""

    @classmethod
    def of(cls, group_start: np.ndarray, group_pos: np.ndarray, parts: Parts) -> "TreePlan":
        """Make the plan for some rows.

        - `group_start`, `group_pos`: int32 [u + 1] and [n], the positions of each row, ascending.

        >>> parts = Parts(np.array([2, 3, 4]), np.array([0, 1, 2]))
        >>> plan = TreePlan.of(np.array([0, 1, 4], np.int32), np.array([0, 1, 2, 3], np.int32), parts)
        >>> plan.stretches.tolist()
        [[0, 0, 1], [1, 1, 2], [1, 2, 3], [1, 3, 4]]
        >>> plan.runs.tolist(), plan.rounds
        ([[1, 2, 1], [1, 3, 1]], (0, 1, 2))
        """
        rows, most = len(group_start) - 1, len(group_pos)
        stretches = np.zeros((rows + most, 3), np.int32)
        runs, rounds = np.empty((most, 3), np.int32), np.empty(most, int)
        m, n = _fill(group_start, group_pos, parts.ends, parts.leaves, stretches, runs, rounds)
        ends = np.cumsum(np.bincount(rounds[:n]))
        return cls(stretches[:m], runs[np.argsort(rounds[:n], kind="stable")], tuple(sorted({0, *ends.tolist()})))


@kernel
def _fill(group_start, group_pos, ends, leaves, stretches, runs, rounds):
    """Write the stretches, and the runs with their rounds. Return how many there are."""
    rows = len(group_start) - 1
    stack, leaf_of = np.empty(DEEPEST, np.int64), np.empty(DEEPEST, np.int64)
    m, n = rows, 0
    for u in range(rows):
        i, last = group_start[u], group_start[u + 1]
        height = part = 0
        stretches[u, 0] = u
        while i < last:
            while group_pos[i] >= ends[part]:
                part += 1
            begin = i
            while i < last and group_pos[i] < ends[part]:
                i += 1
            leaf = leaves[part]
            if leaf == NOWHERE:
                continue
            own = u
            if height > 0:
                own = m
                m += 1
            more = (i - begin - 1) // STRETCH
            for k in range(more + 1):
                s = own if k == 0 else m + k - 1
                stretches[s, 0] = u
                stretches[s, 1] = begin + k * STRETCH
                stretches[s, 2] = min(begin + (k + 1) * STRETCH, i)
            if more > 0:
                runs[n, 0], runs[n, 1], runs[n, 2], rounds[n] = own, m, more, 0
                m += more
                n += 1
            while height > 1 and meets_below(leaf_of[height - 2], leaf_of[height - 1], leaf):
                height -= 1
                n = _join(runs, rounds, n, stack, leaf_of, height)
            stack[height], leaf_of[height] = own, leaf
            height += 1
        while height > 1:
            height -= 1
            n = _join(runs, rounds, n, stack, leaf_of, height)
    return m, n


@kernel
def _join(runs, rounds, n, stack, leaf_of, top):
    """Add the sum on top to the one below it, in the round of the smallest subtree that has both."""
    meet, height = leaf_of[top - 1] ^ leaf_of[top], 0
    while meet > 0:
        meet >>= 1
        height += 1
    runs[n, 0], runs[n, 1], runs[n, 2], rounds[n] = stack[top - 1], stack[top], 1, height
    return n + 1
