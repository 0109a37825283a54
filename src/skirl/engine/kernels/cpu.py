"""The plain loops on the CPU: pool rows into bags, and apply gradients and the row optimizer in one pass."""

from functools import cache as remember
from math import inf
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.extending import overload

from skirl.core import optim
from skirl.core.keys import ROW_BITS
from skirl.core.optim import Rule
from skirl.engine.kernels.tree import DEEPEST, NOWHERE, STRETCH, settled
from skirl.tools import lanes
from skirl.tools.jit import Kernel, kernel


@kernel
def numbers_of(scalars, table):
    return (
        scalars[table, 2], scalars[table, 3], scalars[table, 4], scalars[table, 5], scalars[table, 6], scalars[table, 7]
    )  # fmt: skip


@remember
def compiled(rule: Rule) -> Kernel:
    if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
        return np.errstate(all="ignore")(rule.step)
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    return njit(**options)(rule.step)


def _is_row(*given: Any) -> bool:
    return any(isinstance(one, lanes.Lanes) for one in given)


@overload(optim.root)
def _root(x):
    return (lambda x: lanes.root(x)) if _is_row(x) else (lambda x: np.sqrt(x))


@overload(optim.divide)
def _divide(a, b):
    return lambda a, b: a / b


@overload(optim.zero)
def _zero(like):
    if _is_row(like):
        return lambda like: lanes.filled(like, 0)
    number = np.float32 if like is types.float32 else np.float64
    return lambda like: number(0)


@overload(optim.above)
def _above(a, b, then, other):
    if _is_row(a, b):
        return lambda a, b, then, other: lanes.above(a, b, then, other)
    return lambda a, b, then, other: then if a > b else other


# position  one id of a step, feature-major: (micro-batch, feature in bank order, sample, place in its bag)
# bag       the positions of one feature and sample; its row in `out` and `grads` is sample * features + feature
# scale     one factor for each position (its weight, 1 / count for means), or an empty array when every factor is 1
# slot      row of the cache; a record there is [weight(dim) | state]
#
# Arrays of floats have the cache's dtype. Slots are trusted: they come from the oracle, which knows the cache.


@kernel
def pool(cache, dim, slots, begins, ends, features, scale, out, lo, hi):
    """Sum the rows of each bag into rows lo..hi of out, [batch * features, dim]; an empty bag gives zeros. Bags are
    visited in the order of `out`, which is faster than that of `begins` and `ends`, feature-major: the positions of each
    bag. Both are empty where every bag has one position."""
    one = begins.size == 0
    batch = (slots.size if one else ends.size) // features
    zero = cache.dtype.type(0)
    scaled = scale.size > 0
    sample, feature = lo // features, lo % features
    for row in range(lo, hi):
        bag = feature * batch + sample
        feature += 1
        if feature == features:
            feature = 0
            sample += 1
        first, last = (bag, bag + 1) if one else (begins[bag], ends[bag])
        if first == last:
            for d in range(dim):
                out[row, d] = zero
            continue
        # The sum starts from 0, not from the first term: they differ for -0.0.
        slot = slots[first]
        if scaled:
            times = scale[first]
            for d in range(dim):
                out[row, d] = zero + times * cache[slot, d]
        else:
            for d in range(dim):
                out[row, d] = zero + cache[slot, d]
        for pos in range(first + 1, last):
            slot = slots[pos]
            if scaled:
                times = scale[pos]
                for d in range(dim):
                    out[row, d] = out[row, d] + times * cache[slot, d]
            else:
                for d in range(dim):
                    out[row, d] = out[row, d] + cache[slot, d]


@remember
def update_kernel(rule: Rule | None) -> Kernel:
    """Return the kernel that sums gradients and updates rows by a rule, whatever their dim. Without one it writes the sums
    to `cache`, and to `rows` whether a position of the row had a gradient."""
    step: Any = compiled(rule) if rule else None
    updates, states, one = (True, rule.states, rule.one) if rule else (False, 0, False)

    @kernel
    def update(cache, dim, rows, keys, gradients, parts, scalars, lo, hi):
        """Sum the gradients of distinct rows lo..hi: each part's positions by stretches, then the parts along their tree,
        see tree.py. A part without a gradient at any position adds nothing. Apply the row optimizer to each row that has a
        sum. `scalars`: [tables, COLUMNS], for each table its clip (inf for none), its weight decay, and the rule's
        numbers."""
        group_start, group_pos, bag_of, scale, grads, live = gradients
        ends, leaves, times = parts
        g, work = np.empty(dim, cache.dtype), np.empty(dim, cache.dtype)
        stack, leaf_of = np.empty((DEEPEST, dim), cache.dtype), np.empty(DEEPEST, np.int64)
        zero = cache.dtype.type(0)
        scaled, all_live = scale.size > 0, live.all()
        for u in range(lo, hi):
            end, last = group_start[u], group_start[u + 1]
            height = part = 0
            while end < last:
                first = end
                while group_pos[end] >= ends[part]:
                    part += 1
                while end < last and group_pos[end] < ends[part]:
                    end += 1
                if leaves[part] == NOWHERE:
                    continue
                count = 0
                for d in range(dim):
                    g[d] = zero
                for begin in range(first, end, STRETCH):
                    for d in range(dim):
                        work[d] = zero
                    for i in range(begin, min(begin + STRETCH, end)):
                        pos = group_pos[i]
                        bag = bag_of[pos]
                        if all_live or live[bag % live.size]:
                            count += 1
                            if scaled:
                                factor = scale[pos]
                                for d in range(dim):
                                    work[d] = work[d] + factor * grads[bag, d]
                            else:
                                for d in range(dim):
                                    work[d] = work[d] + grads[bag, d]
                    for d in range(dim):
                        g[d] = g[d] + work[d]
                if count == 0:
                    continue
                if height > 1:
                    height = settled(leaf_of, height, leaves[part], stack)
                for d in range(dim):
                    stack[height, d] = g[d]
                leaf_of[height] = leaves[part]
                height += 1
            if not updates:
                rows[u] = height > 0
            elif height == 0:
                continue
            while height > 1:
                height -= 1
                for d in range(dim):
                    stack[height - 1, d] = stack[height - 1, d] + stack[height, d]
            if not updates:
                for d in range(dim):
                    cache[u, d] = stack[0, d] if rows[u] else zero
                continue
            for d in range(dim):
                g[d] = zero + cache.dtype.type(times) * stack[0, d]
            slot = rows[u]
            table = keys[u] >> ROW_BITS
            clip, decay = scalars[table, 0], scalars[table, 1]
            if clip < inf:
                _clip(g, work, dim, clip)
            if decay != 0:
                for d in range(dim):
                    g[d] = g[d] + decay * cache[slot, d]
            n = numbers_of(scalars, table)
            if one:
                for d in range(dim):
                    work[d] = g[d] * g[d]
                square = tree_sum(work, dim) / cache.dtype.type(dim)
                state = new = cache[slot, dim]
                for d in range(dim):
                    cache[slot, d], new = step(cache[slot, d], g[d], state, square, n)
                cache[slot, dim] = new
            elif states == 0:
                for d in range(dim):
                    cache[slot, d] = step(cache[slot, d], g[d], n)
            elif states == 1:
                for d in range(dim):
                    cache[slot, d], cache[slot, dim + d] = step(cache[slot, d], g[d], cache[slot, dim + d], n)
            else:
                for d in range(dim):
                    cache[slot, d], cache[slot, dim + d], cache[slot, 2 * dim + d] = step(
                        cache[slot, d], g[d], cache[slot, dim + d], cache[slot, 2 * dim + d], n
                    )

    return update


@kernel
def take(cache, slots, out, lo, hi):
    width = out.shape[1]
    for i in range(lo, hi):
        slot = slots[i]
        for d in range(width):
            out[i, d] = cache[slot, d]


@kernel
def put(cache, slots, rows, lo, hi):
    width = cache.shape[1]
    for i in range(lo, hi):
        slot = slots[i]
        for d in range(width):
            cache[slot, d] = rows[i, d]


@kernel
def tree_sum(v, n):
    """Return the sum of v[:n] by halves: add the upper half to the lower until one is left. Overwrites v."""
    half = 1
    while half < n:
        half *= 2
    while n > 1:
        half //= 2
        for i in range(n - half):
            v[i] = v[i] + v[half + i]
        n = half
    return v[0]


@kernel
def _clip(g, work, dim, most):
    for d in range(dim):
        work[d] = g[d] * g[d]
    norm = np.sqrt(tree_sum(work, dim))
    if norm > most:
        shrink = most / norm
        for d in range(dim):
            g[d] = g[d] * shrink


@kernel
def expand(bags, bag, columns, features, out, lo, hi):
    """Copy bags to their samples, for samples lo..hi. `bag`: int32 [batch, shared], the bag of each sample and each
    feature whose bags are shared; `columns`: int32 [shared], these features. Rows of others stay as they are."""
    dim = bags.shape[1]
    for sample in range(lo, hi):
        for i in range(columns.size):
            b, row = bag[sample, i], sample * features + columns[i]
            for d in range(dim):
                out[row, d] = bags[b, d]


@kernel
def fold(grads, bag, columns, features, out, lo, hi):
    """Sum the gradients of samples by bag, for bags lo..hi: over the samples in ascending order, from 0."""
    dim = grads.shape[1]
    zero = grads.dtype.type(0)
    for b in range(lo, hi):
        for d in range(dim):
            out[b, d] = zero
    for sample in range(bag.shape[0]):
        for i in range(columns.size):
            b = bag[sample, i]
            if lo <= b < hi:
                row = sample * features + columns[i]
                for d in range(dim):
                    out[b, d] = out[b, d] + grads[row, d]
