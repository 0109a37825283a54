"""The loop of tree.py for rows of a multiple of 16 floats, or one more, compiled for each dim. A row is one value."""

from functools import cache as remember

import numpy as np

from skirl.engine.kernels.hot_rows import STRETCH
from skirl.engine.kernels.tree import DEEPEST, NOWHERE
from skirl.engine.kernels.wide import AHEAD
from skirl.tools.jit import Kernel, kernel
from skirl.tools.lanes import later, load, store, zeros


@remember
def sums_kernel(n: int) -> Kernel:
    """Return a kernel that sums gradients of `n` numbers over micro-batches. It takes the arguments of `tree.sums`."""

    @kernel
    def sums(group_start, group_pos, bag_of, scale, grads, live, ends, leaves, out, counted, lo, hi):
        nothing = zeros(out, n)
        stack = np.empty((DEEPEST, n), out.dtype)  # of all partial sums but the first, which is in `out`
        leaf_of = np.empty(DEEPEST, np.int64)
        scaled = scale.size > 0
        all_live = live.all()
        final = group_start[hi]
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
                g = nothing
                total = nothing
                while i < last and group_pos[i] < end:
                    if i + AHEAD < final:
                        later(grads, bag_of[group_pos[i + AHEAD]], n)
                    if taken == STRETCH:
                        taken = 0
                        total = total + g
                        g = nothing
                    taken += 1
                    pos = group_pos[i]
                    bag = bag_of[pos]
                    i += 1
                    if all_live or live[bag % live.size]:
                        count += 1
                        if scaled:
                            g = g + scale[pos] * load(grads, bag, 0, n)
                        else:
                            g = g + load(grads, bag, 0, n)
                if count == 0:
                    continue
                leaf = leaves[part]
                while height > 1:  # as tree.settled
                    near, far = leaf_of[height - 2] ^ leaf_of[height - 1], leaf_of[height - 1] ^ leaf
                    if not (near < far and near < near ^ far):
                        break
                    height -= 1
                    if height > 1:
                        store(stack, height - 1, 0, load(stack, height - 1, 0, n) + load(stack, height, 0, n))
                    else:
                        store(out, u, 0, load(out, u, 0, n) + load(stack, 1, 0, n))
                if height:
                    store(stack, height, 0, total + g)
                else:
                    store(out, u, 0, total + g)
                leaf_of[height] = leaf
                height += 1
            counted[u] = height > 0
            while height > 1:
                height -= 1
                if height > 1:
                    store(stack, height - 1, 0, load(stack, height - 1, 0, n) + load(stack, height, 0, n))
                else:
                    store(out, u, 0, load(out, u, 0, n) + load(stack, 1, 0, n))
            if height == 0:
                store(out, u, 0, nothing)

    return sums
