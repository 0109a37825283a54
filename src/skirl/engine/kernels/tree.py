"""The sum of a row's gradients over the micro-batches of a step, along a binary tree: the plain loop and what all share."""

from dataclasses import dataclass

import numpy as np

from skirl.engine.kernels.hot_rows import STRETCH
from skirl.tools.jit import kernel

DEEPEST = 34
"""Most partial sums that a row has at once: leaves stay below 2**32."""
NOWHERE = -1
"""Leaf of positions that are left out."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the positions of each leaf end. The caller decides what a leaf is: a micro-batch, or a trainer's sums."""

    ends: np.ndarray
    """int64 [parts], ascending: the position after the last one of each part."""
    leaves: np.ndarray
    """int64 [parts], ascending: the leaf of each part, or its subtree's first. NOWHERE: its positions are left out."""

    def within(self, block: range) -> "Parts":
        """Return the same, with only the leaves of a block."""
        inside = (self.leaves >= block.start) & (self.leaves < block.stop)
        return Parts(self.ends, np.where(inside, self.leaves, NOWHERE))


@kernel
def sums(group_start, group_pos, bag_of, scale, grads, live, ends, leaves, out, counted, lo, hi):
    """Sum the gradients of distinct rows lo..hi: each part's positions by stretches, then the parts along their tree.

    A part without a gradient at any position adds nothing.

    - `out`: [rows, dim], the sums.
    - `counted`: bool [rows], whether a position of the row had a gradient.
    """
    dim = out.shape[1]
    zero = out.dtype.type(0)
    stack = np.empty((DEEPEST, dim), out.dtype)
    leaf_of = np.empty(DEEPEST, np.int64)
    g = np.empty(dim, out.dtype)
    total = np.empty(dim, out.dtype)
    scaled = scale.size > 0
    all_live = live.all()
    for u in range(lo, hi):
        i, last = group_start[u], group_start[u + 1]
        height = part = 0
        while i < last:
            while group_pos[i] >= ends[part]:
                part += 1
            end = ends[part]
            if leaves[part] == NOWHERE:
                while i < last and group_pos[i] < end:
                    i += 1
                continue
            count = taken = 0
            for d in range(dim):
                g[d] = zero
                total[d] = zero
            while i < last and group_pos[i] < end:
                if taken == STRETCH:
                    taken = 0
                    for d in range(dim):
                        total[d] = total[d] + g[d]
                        g[d] = zero
                taken += 1
                pos = group_pos[i]
                bag = bag_of[pos]
                i += 1
                if all_live or live[bag % live.size]:
                    count += 1
                    if scaled:
                        times = scale[pos]
                        for d in range(dim):
                            g[d] = g[d] + times * grads[bag, d]
                    else:
                        for d in range(dim):
                            g[d] = g[d] + grads[bag, d]
            if count == 0:
                continue
            height = settled(leaf_of, height, leaves[part], stack)
            for d in range(dim):
                stack[height, d] = total[d] + g[d]
            leaf_of[height] = leaves[part]
            height += 1
        counted[u] = height > 0
        while height > 1:
            height -= 1
            for d in range(dim):
                stack[height - 1, d] = stack[height - 1, d] + stack[height, d]
        for d in range(dim):
            out[u, d] = stack[0, d] if height > 0 else zero


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
