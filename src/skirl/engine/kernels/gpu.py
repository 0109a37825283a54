"""The hot loops on a GPU, in Triton, bit for bit those of cpu.py, with its shapes and names. Launchers run on the
current stream, allocate nothing and never synchronise."""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton's types: an annotated number, a function that returns a tuple.)

from collections.abc import Sequence
from functools import cache as remember
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover
    raise ImportError("rows on a GPU need Triton: pip install 'skirl[gpu]'") from error

from skirl.core.initial import NORMAL, UNIFORM
from skirl.core.optim import Rule
from skirl.engine.kernels.gpu_math import (
    GOLDEN,
    ROW_BITS,
    above,
    block,
    divide,
    fold,
    launch,
    mix,
    nearest,
    power_of_two,
    root,
    rows_at,
    scramble,
    signed,
    uniform,
    zero,
)
from skirl.engine.kernels.tree import STRETCH, Gradients

WIDEST = 1024
"""Most columns that one program copies. Adam's records are three times their dim."""

_NORMAL = tl.constexpr(NORMAL)
_UNIFORM = tl.constexpr(UNIFORM)
_STRETCH = tl.constexpr(STRETCH)


def pool(
    cache: torch.Tensor, dim: int, slots: torch.Tensor, offsets: torch.Tensor, features: int, scale: torch.Tensor,
    out: torch.Tensor, ends: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Sum the rows of each bag into `out`, as cpu.pool does over all of it. Without `ends`, each bag ends where the
    next begins."""
    n = out.shape[0]
    launch(
        _pool, n, cache, slots, offsets, offsets[1:] if ends is None else ends, scale, out, n, n // features, features,
        stride=cache.stride(0), out_stride=out.stride(0), dim=dim, ONE=offsets.numel() == 0, SCALED=scale.numel() > 0,
        **block(dim),
    )  # fmt: skip


def fill(
    keys: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, dim: int, width: int, seed: int, kind: torch.Tensor,
    scale: torch.Tensor, quantiles: torch.Tensor, state_value: float,
) -> None:  # fmt: skip
    """Write the first record of each key to its slot, as initial.fill does over all keys. Half-precision rows get the
    float32 value rounded to nearest: once per row, so no bias adds up."""
    n = keys.numel()
    state = width - dim
    launch(
        _fill, n, keys, slots, cache, kind, scale, quantiles, n, signed(mix(seed)),
        stride=cache.stride(0), dim=dim, state=state, S=power_of_two(max(1, state)), VALUE=float(state_value),
        NORMALS=quantiles.numel() > 1, **block(dim),
    )  # fmt: skip


def move(
    source: torch.Tensor, source_index: torch.Tensor | None, target: torch.Tensor, target_index: torch.Tensor | None
) -> None:  # fmt: skip
    """Copy rows. Without an index, they are all, in order."""
    n = len(target if target_index is None else target_index)
    width = target.shape[1]
    shape = block(min(width, WIDEST), elements=2048)
    launch(
        _copy, n, source, source_index, target,
        target_index, n, source_stride=source.stride(0), target_stride=target.stride(0), width=width,
        tiles=-(-width // shape["D"]), **shape,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "batch"], do_not_specialize_on_alignment=["slots", "offsets", "ends", "scale"])
def _pool(
    cache, slots, offsets, ends, scale, out, n, batch, features, stride: tl.constexpr, out_stride: tl.constexpr, dim:
    tl.constexpr, ONE: tl.constexpr, SCALED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    sample = row // features
    bag = (row - sample * features) * batch + sample
    column = tl.arange(0, D)[None, :]
    across = column < dim
    acc = tl.zeros([ROWS, D], out.dtype.element_ty)
    if ONE:
        slot = tl.load(slots + bag, mask=inside, other=0)
        x = rows_at(cache, slot, stride, column, inside[:, None] & across, acc.dtype)
        if SCALED:
            x = tl.load(scale + bag, mask=inside, other=0)[:, None] * x
        acc = acc + x
    else:
        first = tl.load(offsets + bag, mask=inside, other=0)
        length = tl.load(ends + bag, mask=inside, other=0) - first
        for i in range(tl.max(length)):
            on, at = i < length, first + i
            slot = tl.load(slots + at, mask=on, other=0)
            x = rows_at(cache, slot, stride, column, on[:, None] & across, acc.dtype)
            if SCALED:
                x = tl.load(scale + at, mask=on, other=0)[:, None] * x
            acc = acc + x
    to = out + row.to(tl.int64)[:, None] * out_stride + column
    tl.store(to, acc, mask=inside[:, None] & across)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["source_index", "target_index"])
def _copy(
    source, source_index, target, target_index, n, source_stride: tl.constexpr, target_stride: tl.constexpr, width:
    tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * D + tl.arange(0, D)[None, :]
    inside = i < n
    mask = inside[:, None] & (column < width)
    origin, goal = i, i
    if source_index is not None:
        origin = tl.load(source_index + i, mask=inside, other=0)
    if target_index is not None:
        goal = tl.load(target_index + i, mask=inside, other=0)
    x = tl.load(source + origin.to(tl.int64)[:, None] * source_stride + column, mask=mask)
    tl.store(target + goal.to(tl.int64)[:, None] * target_stride + column, x, mask=mask)


@triton.jit(do_not_specialize=["n", "mixed_seed"], do_not_specialize_on_alignment=["keys", "slots", "kind", "scale"])
def _fill(
    keys, slots, cache, kind, scale, quantiles, n, mixed_seed: tl.int64, stride: tl.constexpr, dim: tl.constexpr,
    state: tl.constexpr, S: tl.constexpr, VALUE: tl.constexpr, NORMALS: tl.constexpr, D: tl.constexpr, ROWS:
    tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    key = tl.load(keys + i, mask=inside, other=0)
    slot = tl.load(slots + i, mask=inside, other=0).to(tl.int64)
    table = key >> ROW_BITS
    how = tl.load(kind + table, mask=inside, other=0)[:, None]
    times = tl.load(scale + table, mask=inside, other=0)[:, None]
    column = tl.arange(0, D)[None, :]
    mask = inside[:, None] & (column < dim)
    bits = uniform(scramble((key ^ mixed_seed).to(tl.uint64, bitcast=True)), 0, ROWS, D)
    value = tl.where(how == _UNIFORM, (bits - 8388608).to(times.dtype) * times, times)
    if NORMALS:
        normal = mask & (how == _NORMAL)
        quantile = tl.load(quantiles + (bits >> 8), mask=normal, other=0).to(times.dtype)
        value = tl.where(how == _NORMAL, quantile * times, value)
    record = cache + slot[:, None] * stride
    tl.store(record + column, nearest(value, cache.dtype.element_ty), mask=mask)
    if state > 0:
        beyond = tl.arange(0, S)[None, :]
        same = nearest(tl.full([ROWS, S], VALUE, times.dtype), cache.dtype.element_ty)
        tl.store(record + dim + beyond, same, mask=inside[:, None] & (beyond < state))


def update(
    cache: torch.Tensor, dim: int, rule: Rule, rows: torch.Tensor, keys: torch.Tensor,
    gradients: Gradients[torch.Tensor], scalars: torch.Tensor, clips: bool, stretches: torch.Tensor,
    partial: torch.Tensor, marks: torch.Tensor, *, rounding: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Sum the gradients of distinct rows and apply the row optimizer to each, as the kernel of cpu.py does.

    - `stretches`: int32 [m, 3], from `stretches_of`.
    - `partial`: contiguous scratch [m or more, dim] in the dtype of `grads`; may be empty if m is 0.
    """
    n, m = rows.numel(), stretches.shape[0]
    half = cache.dtype in (torch.float16, torch.bfloat16)
    sum_stretches(gradients, stretches, partial, marks)
    random = 0 if rounding is None else signed(mix((mix(rounding[0]) + (rounding[1] + 1) * GOLDEN.value) % 2**64))
    launch(
        _update_by(rule), n, cache, rows, keys, *_loaded(gradients), scalars, partial, marks, n, m,
        gradients.live.numel(), random, stride=cache.stride(0), columns=scalars.stride(0), STATES=rule.states,
        ONE=rule.one, CLIPS=clips, HALF=half, **_options(gradients, dim), **block(dim),
    )  # fmt: skip


def _loaded(gradients: Gradients[torch.Tensor]) -> Gradients[torch.Tensor]:
    live = gradients.live
    return gradients._replace(live=live.view(torch.uint8) if live.dtype == torch.bool else live)


def _options(gradients: Gradients[torch.Tensor], dim: int) -> dict[str, int]:
    strides = {"grad_stride": gradients.grads.stride(0), "partial_stride": dim}
    return {"dim": dim, **strides, "SCALED": gradients.scale.numel() > 0, "LIVE": gradients.live.numel() > 0}


def sum_stretches(
    gradients: Gradients[torch.Tensor], stretches: torch.Tensor, partial: torch.Tensor, marks: torch.Tensor
) -> None:
    m, dim = stretches.shape[0], gradients.grads.shape[1]
    # Few rows for each program, and one warp: there are a few hundred stretches, and as many multiprocessors.
    shape = block(dim, elements=128)
    shape["num_warps"] = max(1, shape["D"] // 256)
    launch(
        _stretches, m, *_loaded(gradients), stretches, partial, marks, m, gradients.live.numel(),
        **_options(gradients, dim), **shape,
    )  # fmt: skip


@triton.jit
def _sum(
    group_pos, bag_of, scale, grads, live, lives, first, last, stride: tl.constexpr, dim: tl.constexpr, SCALED: tl.constexpr,
    LIVE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the sum of each row's gradients at first..last, in order from zero, and how many there were."""
    acc = tl.zeros([ROWS, D], grads.dtype.element_ty)
    count = tl.zeros([ROWS], tl.int32)
    column = tl.arange(0, D)[None, :]
    for i in range(tl.max(last - first)):
        on = first + i < last
        pos = tl.load(group_pos + first + i, mask=on, other=0)
        bag = tl.load(bag_of + pos, mask=on, other=0)
        if LIVE:
            on = on & (tl.load(live + bag % lives, mask=on, other=0) != 0)
        x = tl.load(grads + bag.to(tl.int64)[:, None] * stride + column, mask=on[:, None] & (column < dim), other=0)
        if SCALED:
            x = tl.load(scale + pos, mask=on, other=0)[:, None] * x
        acc = acc + x
        count += on.to(tl.int32)
    return acc, count


@triton.jit(
    do_not_specialize=["m", "lives"],
    do_not_specialize_on_alignment=["group_start", "group_pos", "bag_of", "scale", "live", "stretches", "marks"],
)  # fmt: skip
def _stretches(
    group_start, group_pos, bag_of, scale, grads, live, stretches, partial, marks, m, lives, grad_stride:
    tl.constexpr, partial_stride: tl.constexpr, dim: tl.constexpr, SCALED: tl.constexpr, LIVE: tl.constexpr, D:
    tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum each stretch into its row of `partial`. `marks` gets the count of each one, then each row's first stretch."""
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = s < m
    u = tl.load(stretches + 3 * s, mask=inside, other=0)
    first = tl.load(stretches + 3 * s + 1, mask=inside, other=0)
    last = tl.load(stretches + 3 * s + 2, mask=inside, other=0)
    acc, count = _sum(
        group_pos, bag_of, scale, grads, live, lives, first, last, grad_stride, dim, SCALED, LIVE, D, ROWS
    )
    column = tl.arange(0, D)[None, :]
    to = partial + s.to(tl.int64)[:, None] * partial_stride + column
    tl.store(to, acc, mask=inside[:, None] & (column < dim))
    tl.store(marks + s, count, mask=inside)
    begins = inside & (first == tl.load(group_start + u, mask=inside, other=0))
    tl.store(marks + m + u, s, mask=begins)


@triton.jit
def add_partials(partial, marks, stride: tl.constexpr, begin, length, acc, count, dim: tl.constexpr, D: tl.constexpr):
    """Add the partial sums of hot rows in order: `length` of them from `begin`, none for most rows."""
    column = tl.arange(0, D)[None, :]
    across = column < dim
    for i in range(tl.max(length)):
        on = i < length
        to = partial + (begin + i).to(tl.int64)[:, None] * stride + column
        acc = acc + tl.load(to, mask=on[:, None] & across, other=0)
        count += tl.load(marks + begin + i, mask=on, other=0)
    return acc, count


@remember
def _update_by(rule: Rule) -> Any:
    """Return the kernel that updates rows by a rule: `_update` with the rule in place of `rule`."""
    step = _with(rule.step, tl=tl, root=root, divide=divide, above=above, zero=zero)
    jit = triton.jit(
        do_not_specialize=["n", "m", "lives", "random"],
        do_not_specialize_on_alignment=[
            "rows", "keys", "group_start", "group_pos", "bag_of", "scale", "live", "scalars", "marks",
        ],
    )  # fmt: skip
    return jit(_with(_update, rule=triton.jit(step)))


def _with(function: Any, **names: Any) -> Any:
    """Return the same function, with other values for some global names."""
    made = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    made.__annotations__ = function.__annotations__
    return made


def rule(*args: Any) -> Any:
    """Stand for the rule in `_update`."""
    raise NotImplementedError


def _update(
    cache, rows, keys, group_start, group_pos, bag_of, scale, grads, live, scalars, partial, marks, n, m, lives,
    random: tl.int64, stride: tl.constexpr, grad_stride: tl.constexpr, partial_stride: tl.constexpr, columns:
    tl.constexpr, STATES: tl.constexpr, ONE: tl.constexpr, CLIPS: tl.constexpr, HALF: tl.constexpr, dim: tl.constexpr,
    SCALED: tl.constexpr, LIVE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = grads.dtype.element_ty
    u = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = u < n
    first = tl.load(group_start + u, mask=inside, other=0)
    last = tl.load(group_start + u + 1, mask=inside, other=0)
    hot = last - first > _STRETCH
    g, count = _sum(
        group_pos, bag_of, scale, grads, live, lives, first, tl.where(hot, first, last), grad_stride, dim, SCALED, LIVE,
        D, ROWS,
    )  # fmt: skip
    begin = tl.load(marks + m + u, mask=hot, other=0)
    length = tl.where(hot, (last - first + (_STRETCH - 1)) // _STRETCH, 0)
    g, count = add_partials(partial, marks, partial_stride, begin, length, g, count, dim, D)
    some = count > 0
    # Single numbers of a row are loaded as [ROWS, 1], not [ROWS]: so they lie where the block needs them, without barriers.
    key = tl.load(keys + u, mask=inside, other=0)
    base = scramble((key ^ random).to(tl.uint64, bitcast=True))
    record = (cache + tl.load(rows + u, mask=inside, other=0).to(tl.int64) * stride)[:, None]
    number = (scalars + (key >> ROW_BITS) * columns)[:, None]
    one = some[:, None]
    column = tl.arange(0, D)[None, :]
    to = record + column
    mask = one & (column < dim)
    w = tl.load(to, mask=mask, other=0).to(dtype)
    if CLIPS:
        most = tl.load(number, mask=one, other=1)
        norm = root(fold(g * g, ROWS, D))
        over = norm > most
        g = tl.where(over, g * divide(most, tl.where(over, norm, 1.0)), g)
    decay = tl.load(number + 1, mask=one, other=0)
    g = tl.where(decay != 0, g + decay * w, g)
    number += 2
    n0, n1, n2 = tl.load(number, mask=one), tl.load(number + 1, mask=one), tl.load(number + 2, mask=one)
    n3, n4, n5 = tl.load(number + 3, mask=one), tl.load(number + 4, mask=one), tl.load(number + 5, mask=one)
    own = (n0, n1, n2, n3, n4, n5)
    if ONE:
        square = divide(fold(g * g, ROWS, D), tl.full([ROWS, 1], dim, dtype))
        w, s = rule(w, g, tl.load(record + dim, mask=one, other=0).to(dtype), square, own)
        _write_one(record + dim, s, one, base, HALF, ROWS)
    elif STATES == 0:
        w = rule(w, g, own)
    elif STATES == 1:
        w, s = rule(w, g, tl.load(to + dim, mask=mask, other=0).to(dtype), own)
        _write(to + dim, s, mask, base, 1, HALF, ROWS, D)
    else:
        s = tl.load(to + dim, mask=mask, other=0).to(dtype)
        t = tl.load(to + 2 * dim, mask=mask, other=0).to(dtype)
        w, s, t = rule(w, g, s, t, own)
        _write(to + dim, s, mask, base, 1, HALF, ROWS, D)
        _write(to + 2 * dim, t, mask, base, 2, HALF, ROWS, D)
    _write(to, w, mask, base, 0, HALF, ROWS, D)


@triton.jit
def _write(to, x, mask, base, part: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Store a part of records, with stochastic rounding if they are half-precision.

    Its seed is (seed, step, key, place in the record), so that a run repeats.
    """
    if HALF:
        tl.store(to, _rounded(x, uniform(base, part, ROWS, D), to.dtype.element_ty), mask=mask)
    else:
        tl.store(to, x, mask=mask)


@triton.jit
def _write_one(to, x, mask, base, HALF: tl.constexpr, ROWS: tl.constexpr):
    if HALF:
        count = tl.full([ROWS, 1], 4294967297, tl.uint64)
        bits = (scramble(base[:, None] + count * GOLDEN) >> 40).to(tl.int32)
        tl.store(to, _rounded(x, bits, to.dtype.element_ty), mask=mask)
    else:
        tl.store(to, x, mask=mask)


@triton.jit
def _rounded(x, random, dtype: tl.constexpr):
    """Round a float32 to one of its two neighbours in `dtype`, by 24 random bits.

    Random bits are added below the last bit that stays and then cut off, so that they carry with the right probability.
    Numbers below the smallest normal of float16 are rounded separately: their neighbours are 2**-24 apart.
    """
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    if dtype == tl.bfloat16:
        up = tl.where(finite, bits + (random >> 8).to(tl.uint32), bits | tl.where(x != x, 0x400000, 0).to(tl.uint32))
        return (up >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        up = tl.where(finite, (bits + (random >> 11).to(tl.uint32)) & 0xFFFFE000, bits)
        small = tl.abs(x) * 16777216.0
        whole = small.to(tl.int32).to(tl.float32)
        carry = ((small - whole) * 16777216.0).to(tl.int32) + random >= 16777216
        tiny = (whole + tl.where(carry, 1.0, 0.0)) * 5.9604644775390625e-08
        tiny_bits = tiny.to(tl.uint32, bitcast=True) | (bits & 0x80000000)
        bits = tl.where(tl.abs(x) < 6.103515625e-05, tiny_bits, up)
        return bits.to(tl.float32, bitcast=True).to(dtype)


def sums(
    gradients: Gradients[torch.Tensor], stretches: torch.Tensor, runs: torch.Tensor, rounds: Sequence[int],
    partial: torch.Tensor, marks: torch.Tensor,
) -> None:  # fmt: skip
    """Sum the gradients of distinct rows into the first rows of `partial`, [m, dim] for m stretches. The first
    of `marks`, int32 [m + rows], receive how many positions of each row had a gradient."""
    dim = gradients.grads.shape[1]
    sum_stretches(gradients, stretches, partial, marks)
    for lo, hi in pairwise(rounds):
        launch(_add_runs, hi - lo, partial, marks, runs[lo:hi], hi - lo, stride=dim, dim=dim, **block(dim))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["runs", "marks"])
def _add_runs(
    partial, marks, runs, n, stride: tl.constexpr, dim: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Add each run to its row of `partial`, and its count to `marks`."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < n
    own = tl.load(runs + 3 * r, mask=inside, other=0)
    begin = tl.load(runs + 3 * r + 1, mask=inside, other=0)
    length = tl.load(runs + 3 * r + 2, mask=inside, other=0)
    column = tl.arange(0, D)[None, :]
    mask = inside[:, None] & (column < dim)
    to = partial + own.to(tl.int64)[:, None] * stride + column
    acc = tl.load(to, mask=mask, other=0)
    count = tl.load(marks + own, mask=inside, other=0)
    acc, count = add_partials(partial, marks, stride, begin, length, acc, count, dim, D)
    tl.store(to, acc, mask=mask)
    tl.store(marks + own, count, mask=inside)
