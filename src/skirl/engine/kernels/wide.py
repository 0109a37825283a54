"""Loops of the CPU in vector lanes, compiled for a dim, with the bits of the plain ones."""

from functools import cache as remember
from math import inf
from typing import Any

import numpy as np

from skirl.core.keys import ROW_BITS
from skirl.core.optim import Rule
from skirl.engine.kernels.cpu import compiled, numbers_of
from skirl.engine.kernels.tree import DEEPEST, NOWHERE, STRETCH, settled
from skirl.tools.jit import Kernel, kernel
from skirl.tools.lanes import later, load, soon, store, total, written_soon, zeros

AHEAD = 64
"""Positions ahead of its use at which a row is prefetched."""
ROWS_AHEAD = 16


@remember
def pool_kernel(n: int, across: bool, one: bool) -> Kernel:
    """Return a kernel that pools. `one`: each bag has exactly one id, so there are no offsets to read and no inner loop."""
    near = n + across

    @kernel
    def pool(cache, dim, slots, begins, ends, features, scale, out, lo, hi):
        batch = (slots.size if one else ends.size) // features
        nothing = zeros(cache, n)
        scaled = scale.size > 0
        ahead = max(1, AHEAD // features)
        sample, feature = lo // features, lo % features
        bag = feature * batch + sample
        for row in range(lo, hi):
            if sample + ahead < batch:
                far = bag + ahead
                first, last = (far, far + 1) if one else (begins[far], ends[far])
                for pos in range(first, last):
                    soon(cache, slots[pos], near)
            acc = nothing  # the sum starts from 0, not from the first term: they differ for -0.0
            first, last = (bag, bag + 1) if one else (begins[bag], ends[bag])
            for pos in range(first, last):
                if scaled:
                    acc = acc + scale[pos] * load(cache, slots[pos], 0, n)
                else:
                    acc = acc + load(cache, slots[pos], 0, n)
            store(out, row, 0, acc)
            feature += 1
            bag += batch
            if feature == features:
                feature = 0
                sample += 1
                bag = sample

    return pool


@remember
def update_kernel(n: int, rule: Rule | None, whole: bool) -> Kernel:
    """Return a kernel for rows of `n` numbers that takes the arguments of the plain one. `whole`: all is of one part."""
    step: Any = compiled(rule) if rule else None
    updates, states, one = (True, rule.states, rule.one) if rule else (False, 0, False)
    width = n + 1 if one else n * (1 + states)

    @kernel
    def update(cache, dim, rows, keys, gradients, parts, scalars, lo, hi):
        group_start, group_pos, bag_of, scale, grads, live = gradients
        ends, leaves, times = parts
        number = cache.dtype.type
        nothing = zeros(cache, n)
        stack, leaf_of = np.empty((DEEPEST, n), cache.dtype), np.empty(DEEPEST, np.int64)
        scaled, all_live = scale.size > 0, live.all()
        final = group_start[hi]
        if updates:
            for u in range(lo, min(lo + ROWS_AHEAD, hi)):
                written_soon(cache, rows[u], width)
        for u in range(lo, hi):
            if updates and u + ROWS_AHEAD < hi:
                written_soon(cache, rows[u + ROWS_AHEAD], width)
            end, last = group_start[u], group_start[u + 1]
            height = part = 0
            top = nothing  # the newest of the partial sums; those before it are in the stack
            while whole or end < last:
                first = end
                if whole:
                    end = last
                else:
                    while group_pos[end] >= ends[part]:
                        part += 1
                    while end < last and group_pos[end] < ends[part]:
                        end += 1
                    if leaves[part] == NOWHERE:
                        continue
                count = 0
                g = before = nothing
                for begin in range(first, end, STRETCH):
                    before = before + g
                    g = nothing
                    for i in range(begin, min(begin + STRETCH, end)):
                        if i + AHEAD < final:
                            later(grads, bag_of[group_pos[i + AHEAD]], n)
                        pos = group_pos[i]
                        bag = bag_of[pos]
                        if all_live or live[bag % live.size]:
                            count += 1
                            if scaled:
                                g = g + scale[pos] * load(grads, bag, 0, n)
                            else:
                                g = g + load(grads, bag, 0, n)
                if whole:
                    top = before + g
                    height = count
                    break
                if count > 0:
                    if height > 0:
                        store(stack, height - 1, 0, top)
                        height = settled(leaf_of, height, leaves[part], stack)
                    top = before + g
                    leaf_of[height] = leaves[part]
                    height += 1
            if not updates:
                rows[u] = height > 0
            elif height == 0:
                continue
            while not whole and height > 1:
                height -= 1
                top = load(stack, height - 1, 0, n) + top
            if not updates:
                store(cache, u, 0, top)
                continue
            g = nothing + number(times) * top
            slot = rows[u]
            table = keys[u] >> ROW_BITS
            clip, decay = scalars[table, 0], scalars[table, 1]
            if clip < inf:
                norm = np.sqrt(total(g * g))
                if norm > clip:
                    g = (clip / norm) * g
            w = load(cache, slot, 0, n)
            if decay != 0:
                g = g + decay * w
            own = numbers_of(scalars, table)
            if one:
                w, cache[slot, n] = step(w, g, cache[slot, n], total(g * g) / number(n), own)
            elif states == 0:
                w = step(w, g, own)
            elif states == 1:
                w, s = step(w, g, load(cache, slot, n, n), own)
                store(cache, slot, n, s)
            else:
                w, s, t = step(w, g, load(cache, slot, n, n), load(cache, slot, 2 * n, n), own)
                store(cache, slot, n, s)
                store(cache, slot, 2 * n, t)
            store(cache, slot, 0, w)

    return update
