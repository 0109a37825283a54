"""The hot loops on a GPU, in Triton, bit for bit those of cpu.py, with its shapes and names. Launchers run on the
current stream, allocate nothing and never synchronise."""

# pyright: reportInvalidTypeForm=false
# (Triton's types: an annotated number.)

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # pragma: no cover
    raise ImportError("rows on a GPU need Triton: pip install 'skirl[gpu]'") from error

from skirl.core.initial import NORMAL, UNIFORM
from skirl.engine.kernels.gpu_math import (
    ROW_BITS,
    as_bytes,
    block,
    fold,
    launch,
    mix,
    nearest,
    power_of_two,
    rows_at,
    scramble,
    signed,
    uniform,
)
from skirl.engine.kernels.gpu_update import sums, update

__all__ = ["fill", "move", "pool", "sums", "update", "weight_grad"]

WIDEST = 1024
"""Most columns that one program copies. Adam's records are three times their dim."""

_NORMAL = tl.constexpr(NORMAL)
_UNIFORM = tl.constexpr(UNIFORM)


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


def weight_grad(
    cache: torch.Tensor, dim: int, slots: torch.Tensor, bag_of: torch.Tensor, grads: torch.Tensor, live: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the gradient of each position's weight, as cpu.weight_grad does over all. `live` may be empty if all
    features have one."""
    n = slots.numel()
    launch(
        _weight_grad, n, cache, slots, bag_of, grads, as_bytes(live), out, n, live.numel(),
        stride=cache.stride(0), grad_stride=grads.stride(0), dim=dim, LIVE=live.numel() > 0, **block(dim),
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


@triton.jit(do_not_specialize=["n", "lives"], do_not_specialize_on_alignment=["slots", "bag_of", "live", "out"])
def _weight_grad(
    cache, slots, bag_of, grads, live, out, n, lives, stride: tl.constexpr, grad_stride: tl.constexpr, dim:
    tl.constexpr, LIVE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    pos = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = pos < n
    column = tl.arange(0, D)[None, :]
    bag = tl.load(bag_of + pos, mask=inside, other=0)
    slot = tl.load(slots + pos, mask=inside, other=0)
    counts = inside
    if LIVE:
        counts = counts & (tl.load(live + bag % lives, mask=inside, other=0) != 0)
    mask = counts[:, None] & (column < dim)
    grad = rows_at(grads, bag, grad_stride, column, mask, out.dtype.element_ty)
    product = grad * rows_at(cache, slot, stride, column, mask, out.dtype.element_ty)
    tl.store(out + pos[:, None], 0.0 + fold(product, ROWS, D), mask=inside[:, None])


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
