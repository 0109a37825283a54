"""The hot loops for rows that are a multiple of 16 floats: those of cpu.py with dim known, a row being one value.

Made for each dim when first used: 0.4 s of compiling, cached on disk; for 16 to 256 floats, beyond which a row no longer
fits in registers. Both loops are bound by memory: each asks for the rows that it will need in `AHEAD` positions, which took
pooling from 7.5 to 5.3 ms and updating from 7.0 to 4.0 ms at 8192 x 26 x 64 on one core. Records that begin on a cache
line (a RowwiseAdagrad record has one number too many for that) brought nothing on top. Other dims and float64 take the
plain loops, at two to four times the time: a second set of vectors for what is left over would double this file.

Arguments are those of `cpu.pool` and `cpu.update`, and so are the bits.
"""

from collections.abc import Callable
from functools import cache as remember
from math import inf
from typing import Any

import numpy as np
from numba import config

from skirl.core.keys import ROW_BITS
from skirl.core.optim import KIND_ADAGRAD, KIND_ADAM, KIND_ROWWISE_ADAGRAD, KIND_SGD
from skirl.engine.kernels import cpu
from skirl.engine.kernels.hot_rows import STRETCH
from skirl.engine.kernels.lanes import BYTES, later, load, root, soon, store, stream, total, written_soon, zeros
from skirl.tools.jit import kernel

WIDEST = 256
AHEAD = 64
"""Positions between asking for a row and using it. At 24 dim 16 took 1.15x as long, from 64 to 96 all are alike."""
ROWS_AHEAD = 16
STREAMED = 32 << 20
"""Bytes of an output from which it is written past the caches: its reader would not find it there anyway."""

Kernel = Callable[..., Any]


def pool_for(dim: int, width: int, out: np.ndarray, one: bool) -> Kernel:
    """The kernel that pools rows out of records of `width` into `out`; one: exactly one id a bag, and offsets are empty."""
    if not _fits(dim, out.dtype):
        return cpu.pool
    across = width % 16 != 0
    return (_gather if one else _pool)(dim, across, out.nbytes >= STREAMED and out.ctypes.data % BYTES == 0)


def update_for(dim: int, dtype: np.dtype, kind: int) -> Kernel:
    """The kernel that applies a kind of row optimizer to rows of `dim`."""
    return _update(dim, kind) if _fits(dim, dtype) else cpu.update


def _fits(dim: int, dtype: np.dtype) -> bool:
    return (
        dtype == np.float32 and dim % 16 == 0 and dim <= WIDEST and not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    )


@remember
def _gather(n: int, across: bool, streams: bool) -> Kernel:
    """Exactly one id a bag: no offsets to read, no inner loop."""
    near = n + across  # a row that does not begin on a cache line ends on one more

    @kernel
    def gather(cache, dim, slots, offsets, features, scale, out, lo, hi):
        batch = slots.size // features
        nothing = zeros(cache, n)
        scaled = scale.size > 0
        ahead = max(1, AHEAD // features)
        sample, feature = lo // features, lo % features
        pos = feature * batch + sample
        for row in range(lo, hi):
            if sample + ahead < batch:
                soon(cache, slots[pos + ahead], near)
            acc = load(cache, slots[pos], 0, n)
            if scaled:
                acc = scale[pos] * acc
            acc = nothing + acc
            if streams:
                stream(out, row, 0, acc)
            else:
                store(out, row, 0, acc)
            feature += 1
            pos += batch
            if feature == features:
                feature = 0
                sample += 1
                pos = sample

    return gather


@remember
def _pool(n: int, across: bool, streams: bool) -> Kernel:
    near = n + across

    @kernel
    def pool(cache, dim, slots, offsets, features, scale, out, lo, hi):
        batch = (offsets.size - 1) // features
        nothing = zeros(cache, n)
        scaled = scale.size > 0
        ahead = max(1, AHEAD // features)
        sample, feature = lo // features, lo % features
        bag = feature * batch + sample
        for row in range(lo, hi):
            if sample + ahead < batch:
                for pos in range(offsets[bag + ahead], offsets[bag + ahead + 1]):
                    soon(cache, slots[pos], near)
            acc = nothing  # the sum starts from 0, not from the first term: they differ for -0.0
            for pos in range(offsets[bag], offsets[bag + 1]):
                if scaled:
                    acc = acc + scale[pos] * load(cache, slots[pos], 0, n)
                else:
                    acc = acc + load(cache, slots[pos], 0, n)
            if streams:
                stream(out, row, 0, acc)
            else:
                store(out, row, 0, acc)
            feature += 1
            bag += batch
            if feature == features:
                feature = 0
                sample += 1
                bag = sample

    return pool


@remember
def _update(n: int, which: int) -> Kernel:
    width = {KIND_SGD: n, KIND_ADAGRAD: 2 * n, KIND_ROWWISE_ADAGRAD: n + 1, KIND_ADAM: 3 * n}[which]

    @kernel
    def once(
        cache, dim, kind, rows, keys, group_start, group_pos, bag_of, scale, grads, live, scalars, clip, lo, hi
    ):  # fmt: skip
        number = cache.dtype.type
        nothing = zeros(cache, n)
        scaled = scale.size > 0
        all_live = live.all()
        end = group_start[hi]
        for u in range(lo, min(lo + ROWS_AHEAD, hi)):
            written_soon(cache, rows[u], width)
        for u in range(lo, hi):
            if u + ROWS_AHEAD < hi:
                written_soon(cache, rows[u + ROWS_AHEAD], width)
            count = 0
            g = nothing
            first, last = group_start[u], group_start[u + 1]
            if last - first > STRETCH:
                last = first  # `update` comes back to it: a loop over stretches here took 1.07x as long at dim 16
            for i in range(first, last):
                if i + AHEAD < end:
                    later(grads, bag_of[group_pos[i + AHEAD]], n)
                pos = group_pos[i]
                bag = bag_of[pos]
                if all_live or live[bag % live.size]:
                    count += 1
                    if scaled:
                        g = g + scale[pos] * load(grads, bag, 0, n)
                    else:
                        g = g + load(grads, bag, 0, n)
            if count == 0:
                continue
            if clip < inf:
                norm = np.sqrt(total(g * g))
                if norm > number(clip):
                    g = (number(clip) / norm) * g
            slot = rows[u]
            table = keys[u] >> ROW_BITS
            w = load(cache, slot, 0, n)
            if which == KIND_SGD:
                w = w - scalars[table, 0] * g
            elif which == KIND_ADAGRAD:
                s = load(cache, slot, n, n) + g * g
                store(cache, slot, n, s)
                w = w - scalars[table, 0] * (g / (scalars[table, 1] + root(s)))
            elif which == KIND_ROWWISE_ADAGRAD:
                if scalars[table, 2] != 0:
                    g = g + scalars[table, 2] * w
                s = cache[slot, n] + total(g * g) / number(n)
                cache[slot, n] = s
                w = w - (scalars[table, 0] / (np.sqrt(s) + scalars[table, 1])) * g
            elif which == KIND_ADAM:
                m = load(cache, slot, n, n)
                v = load(cache, slot, 2 * n, n)
                m = m + scalars[table, 1] * (g - m)
                v = v + scalars[table, 2] * (g * g - v)
                store(cache, slot, n, m)
                store(cache, slot, 2 * n, v)
                w = w - scalars[table, 0] * (m / (scalars[table, 3] + root(v)))
            store(cache, slot, 0, w)

    @kernel
    def hot(rows, keys, group_start, group_pos, bag_of, scale, grads, live, lo, hi):
        """The rows of lo..hi with more than one stretch and some gradient: their slots, keys, and gradients summed."""
        m = 0
        for u in range(lo, hi):
            m += group_start[u + 1] - group_start[u] > STRETCH
        nothing = zeros(grads, n)
        scaled = scale.size > 0
        all_live = live.all()
        slots, names, sums = np.empty(m, rows.dtype), np.empty(m, keys.dtype), np.empty((m, n), grads.dtype)
        m = 0
        for u in range(lo, hi):
            first, last = group_start[u], group_start[u + 1]
            if last - first <= STRETCH:
                continue
            count = 0
            g = nothing
            for begin in range(first, last, STRETCH):
                part = nothing
                for i in range(begin, min(begin + STRETCH, last)):
                    if i + AHEAD < last:
                        later(grads, bag_of[group_pos[i + AHEAD]], n)
                    pos = group_pos[i]
                    bag = bag_of[pos]
                    if all_live or live[bag % live.size]:
                        count += 1
                        if scaled:
                            part = part + scale[pos] * load(grads, bag, 0, n)
                        else:
                            part = part + load(grads, bag, 0, n)
                g = g + part
            if count > 0:
                slots[m], names[m] = rows[u], keys[u]
                store(sums, m, 0, g)
                m += 1
        return slots[:m], names[:m], sums[:m]

    def update(
        cache, dim, kind, rows, keys, group_start, group_pos, bag_of, scale, grads, live, scalars, clip, lo, hi
    ):  # fmt: skip
        # Not a kernel: Numba finds none in its cache that calls others made here, and compiled it in every process anew.
        once(cache, dim, kind, rows, keys, group_start, group_pos, bag_of, scale, grads, live, scalars, clip, lo, hi)
        slots, names, sums = hot(rows, keys, group_start, group_pos, bag_of, scale, grads, live, lo, hi)
        if len(slots):
            # From here on they are rows with one position each, whose gradient is the sum.
            each = np.arange(len(slots) + 1, dtype=np.int32)
            once(
                cache, dim, kind, slots, names, each, each[:-1], each[:-1], scale[:0], sums, np.ones(1, np.bool_),
                scalars, clip, 0, len(slots),
            )  # fmt: skip

    return update
