"""A sample's first vector, followed by the dot products of all pairs of its vectors: the input of DLRM's top layers."""

from collections.abc import Callable
from functools import cache as remember
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.models.base import fit
from skirl.tools.jit import Kernel, kernel
from skirl.tools.lanes import load, store, zeros
from skirl.tools.threads import run

WIDEST = 256
"""The longest vector that fits in registers."""
_TILE = 16
"""Number of dot products summed at a time."""


captures = False
"""Whether a sweep captures a graph now, in which our loops are an operator."""


def pairs(x: Tensor, vectors: Tensor, places: Tensor) -> Tensor:
    """Concatenate x and the dot products of all pairs among x and the vectors: [batch, dim + n (n + 1) / 2].

    The pairs are ordered (1, 0), (2, 0), (2, 1), (3, 0) ..., where 0 is x. On a CPU, each product is summed in the
    order of the vectors' numbers, starting from 0, with torch's number of threads.

    - `x`: [batch, dim].
    - `vectors`: [batch, n, dim].
    """
    if 0 < x.shape[1] <= WIDEST and fit(x, vectors, captured=captures):
        return operator()(x, vectors) if captures else _Pairs.apply(x, vectors)
    return by_torch(x, vectors, places)


def by_torch(x: Tensor, vectors: Tensor, places: Tensor) -> Tensor:
    """Do the same with torch's operations: on a GPU, while a graph is captured, and for other dtypes."""
    whole = torch.cat([x[:, None], vectors], dim=1)
    products = torch.bmm(whole, whole.transpose(1, 2)).flatten(1)
    return torch.cat([x, products.index_select(1, places)], dim=1)


def places(n: int) -> Tensor:
    """Return the indices of the pairs of n vectors among all n * n products."""
    first, second = torch.tril_indices(n, n, offset=-1)
    return first * n + second


class _Pairs(torch.autograd.Function):
    """The products in our own loops, which take a quarter of the time of a matrix product for each sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor) -> Tensor:
        x, vectors = x.detach().contiguous(), vectors.detach().contiguous()
        ctx.save_for_backward(x, vectors)
        return products(x, vectors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, vectors = ctx.saved_tensors
        return gradients(x, vectors, grad)


@remember
def operator() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the pairs as an operator of torch, for graphs. Outside of one, it would take 60 us more than a function."""

    forward = torch.library.custom_op("skirl::pairs", products, mutates_args=())
    backward = torch.library.custom_op("skirl::pairs_backward", gradients, mutates_args=())

    @forward.register_fake
    def _(x: Tensor, vectors: Tensor) -> Tensor:
        n = vectors.shape[1]
        return x.new_empty(len(x), x.shape[1] + n * (n + 1) // 2)

    @backward.register_fake
    def _(x: Tensor, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_empty(x.shape), x.new_empty(vectors.shape)

    forward.register_autograd(
        lambda ctx, grad: backward(*ctx.saved_tensors, grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return forward


def products(x: Tensor, vectors: Tensor) -> Tensor:
    x, vectors = x.contiguous(), vectors.contiguous()
    batch, n, dim = vectors.shape
    out = torch.empty(batch, dim + n * (n + 1) // 2, dtype=x.dtype)
    run(
        _products(dim), batch, x.numpy(), vectors.view(-1, dim).numpy(), n, out.numpy(), threads=torch.get_num_threads()
    )
    return out


def gradients(x: Tensor, vectors: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, vectors, grad = x.contiguous(), vectors.contiguous(), grad.contiguous()
    batch, n, dim = vectors.shape
    of_x, of_vectors = torch.empty_like(x), torch.empty_like(vectors)
    run(
        _gradients(8 if dim <= 8 else -(-dim // _TILE) * _TILE), batch, x.numpy(), vectors.view(-1, dim).numpy(), n,
        grad.numpy(), of_x.numpy(), of_vectors.view(-1, dim).numpy(), threads=torch.get_num_threads(),
    )  # fmt: skip
    return of_x, of_vectors


LOOPS = {"skirl::pairs": products, "skirl::pairs_backward": gradients}
"""What computes an operator of ours in a graph that is ready, by its name: torch takes 50 us to call the operator."""


@remember
def _products(dim: int) -> Kernel:
    """Return a kernel for the products of vectors of this length."""

    @kernel
    def of_all(x, vectors, n, out, lo, hi):
        # Each sample's vectors are stored as columns, to sum 16 products at a time.
        columns = np.zeros((dim, (n + _TILE) // _TILE * _TILE), x.dtype)
        found, width = np.empty((1, _TILE), x.dtype), out.shape[1]
        for sample in range(lo, hi):
            for d in range(dim):
                columns[d, 0] = x[sample, d]
                out[sample, d] = x[sample, d]
            for i in range(n):
                for d in range(dim):
                    columns[d, i + 1] = vectors[sample * n + i, d]
            place = dim
            for i in range(1, n + 1):
                for first in range(0, i, _TILE):
                    acc = zeros(columns, 16)
                    for d in range(dim):
                        acc = acc + columns[d, i] * load(columns, d, first, 16)
                    begin = place + first
                    if begin + 16 <= width:  # the vectors that follow overwrite what is too much
                        store(out, sample, begin, acc)
                    else:
                        store(found, 0, 0, acc)
                        for j in range(width - begin):
                            out[sample, begin + j] = found[0, j]
                place += i

    return of_all


@remember
def _gradients(wide: int) -> Kernel:
    """Return a kernel for the gradients of x and the vectors. Each gradient sums over all other vectors in ascending
    order. The sum of x starts from its own gradient, the others from 0.

    wide: length of a vector, rounded up to 8 or to a multiple of 16.
    """

    @kernel
    def of_all(x, vectors, n, grad, of_x, of_vectors, lo, hi):
        dim = x.shape[1]
        rows = np.zeros((n + 1, wide), x.dtype)
        sums = np.zeros((n + 1, wide), x.dtype)
        for sample in range(lo, hi):
            for d in range(dim):
                rows[0, d] = x[sample, d]
                sums[0, d] = grad[sample, d]
            for i in range(n):
                for d in range(dim):
                    rows[i + 1, d] = vectors[sample * n + i, d]
            place = dim
            for i in range(1, n + 1):
                own = load(rows, i, 0, wide)
                acc = zeros(rows, wide)
                for j in range(i):
                    one = grad[sample, place + j]
                    acc = acc + one * load(rows, j, 0, wide)
                    store(sums, j, 0, load(sums, j, 0, wide) + one * own)
                store(sums, i, 0, acc)
                place += i
            for d in range(dim):
                of_x[sample, d] = sums[0, d]
            for i in range(n):
                for d in range(dim):
                    of_vectors[sample * n + i, d] = sums[i + 1, d]

    return of_all
