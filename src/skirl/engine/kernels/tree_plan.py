"""The plan by which a GPU sums gradients over the micro-batches of a step: each stretch, then rounds of additions.

No addition of a round needs another one of it, so each round is one launch over all rows.
"""

from dataclasses import dataclass

import numpy as np

from skirl.engine.kernels.hot_rows import STRETCH
from skirl.engine.kernels.tree import DEEPEST, NOWHERE, Parts, meets_below
from skirl.tools.jit import kernel


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
        sizes = np.zeros(DEEPEST + 1, np.int64)
        none = np.empty((0, 3), np.int32)
        m = _fill(group_start, group_pos, parts.ends, parts.leaves, none, none, sizes, False)
        stretches, runs = np.zeros((m, 3), np.int32), np.empty((int(sizes.sum()), 3), np.int32)
        at = np.concatenate([[0], np.cumsum(sizes)])
        _fill(group_start, group_pos, parts.ends, parts.leaves, stretches, runs, at[:-1].copy(), True)
        return cls(stretches, runs, tuple(sorted(set(at.tolist()))))


@kernel
def _fill(group_start, group_pos, ends, leaves, stretches, runs, at, writes):
    """Count the stretches, and the runs by round into `at`. Or write them, those of each round from its `at` on."""
    rows = len(group_start) - 1
    stack, leaf_of = np.empty(DEEPEST, np.int64), np.empty(DEEPEST, np.int64)
    m = rows
    for u in range(rows):
        i, last = group_start[u], group_start[u + 1]
        height = part = 0
        if writes:
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
            if writes:
                for k in range(more + 1):
                    s = own if k == 0 else m + k - 1
                    stretches[s, 0] = u
                    stretches[s, 1] = begin + k * STRETCH
                    stretches[s, 2] = min(begin + (k + 1) * STRETCH, i)
            if more > 0:
                _run(runs, at, 0, own, m, more, writes)
                m += more
            while height > 1 and meets_below(leaf_of[height - 2], leaf_of[height - 1], leaf):
                height -= 1
                _join(runs, at, stack, leaf_of, height, writes)
            stack[height], leaf_of[height] = own, leaf
            height += 1
        while height > 1:
            height -= 1
            _join(runs, at, stack, leaf_of, height, writes)
    return m


@kernel
def _join(runs, at, stack, leaf_of, top, writes):
    """Add the sum on top to the one below it, in the round of the smallest subtree that has both."""
    meet, height = leaf_of[top - 1] ^ leaf_of[top], 0
    while meet > 0:
        meet >>= 1
        height += 1
    _run(runs, at, height, stack[top - 1], stack[top], 1, writes)


@kernel
def _run(runs, at, number, to, begin, length, writes):
    if writes:
        runs[at[number], 0] = to
        runs[at[number], 1] = begin
        runs[at[number], 2] = length
    at[number] += 1
