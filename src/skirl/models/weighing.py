"""DIN's sum over a sample's history, in our own loops: the ids of a bag are read once for all of its samples."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.models.history import TILE, SamplesByBag
from skirl.tools.jit import kernel
from skirl.tools.lanes import above, filled, load, store, total, zeros
from skirl.tools.threads import run

_ROWS = 4
"""Rows of a product that are summed at a time, so that what they share is loaded once."""


def interests(
    h: Tensor, matrices: Tensor, hidden: Tensor, slope: Tensor, last: Tensor, bias: Tensor, by_bag: SamplesByBag
) -> Tensor:
    """Return each sample's sum of its bag's rows, weighted by `last . prelu(matrix h + hidden) + bias`: [batch, dim].

    Gradients of a bag's rows are summed over its samples in ascending order, whatever torch's number of threads.

    - `h`: [ids, dim], the rows of all bags.
    - `matrices`: [batch, width, dim], a matrix of each sample.
    - `hidden`: [batch, width], what its product is added to.
    - `slope`: [1], that of PReLU below 0.
    - `last`, `bias`: [width] and [1], of the last layer.
    """
    return _Interests.apply(h, matrices, hidden, slope, last, bias, by_bag)


class _Interests(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, by_bag = given
        h, matrices, hidden, slope, last, bias = tensors = [each.detach().contiguous() for each in tensors]
        ctx.save_for_backward(*tensors)
        ctx.by_bag = by_bag
        out = torch.empty(len(matrices), h.shape[1], dtype=h.dtype)
        run(
            _forward, len(by_bag.begins), *(each.numpy() for each in tensors), *by_bag, out.numpy(),
            threads=torch.get_num_threads(), work=by_bag.first,
        )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, matrices, hidden, slope, last, bias = tensors = ctx.saved_tensors
        of_h, of_matrices, of_hidden = torch.zeros_like(h), torch.empty_like(matrices), torch.empty_like(hidden)
        of_last, of_both = torch.empty_like(hidden), hidden.new_empty(len(hidden), 2)
        by_bag = ctx.by_bag
        run(
            _backward, len(by_bag.begins), *(each.numpy() for each in tensors), *by_bag,
            grad.contiguous().numpy(), of_h.numpy(), of_matrices.numpy(), of_hidden.numpy(), of_last.numpy(),
            of_both.numpy(), threads=torch.get_num_threads(), work=by_bag.first,
        )  # fmt: skip
        of_slope, of_bias = of_both.sum(0).split(1)
        return of_h, of_matrices, of_hidden, of_slope, of_last.sum(0), of_bias, None


@kernel
def _laid_out(h, begin, end, rows, turned):
    """Fill rows, [ids, dim], and turned, [dim, ids], with those of a bag, and zeros up to a whole tile. Return its end."""
    n, dim = end - begin, h.shape[1]
    tiles = (n + TILE - 1) // TILE * TILE
    for i in range(n):
        for d in range(dim):
            rows[i, d] = h[begin + i, d]
            turned[d, i] = h[begin + i, d]
    for d in range(dim):
        turned[d, n:tiles] = 0
    return tiles


@kernel
def _take(of_matrix, of_hidden, matrix, begin):
    """Copy a sample's matrix and hidden layer. Numba compiles an assignment to a slice for seconds."""
    for j in range(len(of_hidden)):
        begin[j] = of_hidden[j]
        for d in range(of_matrix.shape[1]):
            matrix[j, d] = of_matrix[j, d]


@kernel
def _product(left, right, begin, shared, out, columns):
    """Fill out, [rows, columns], with left, [rows, shared], times right, [shared, columns], plus a number for each row."""
    for j in range(0, len(left), _ROWS):
        for i in range(0, columns, TILE):
            like = load(right, 0, i, 16)
            a, b = filled(like, begin[j]), filled(like, begin[j + 1])
            c, e = filled(like, begin[j + 2]), filled(like, begin[j + 3])
            for k in range(shared):
                one = load(right, k, i, 16)
                a = a + left[j, k] * one
                b = b + left[j + 1, k] * one
                c = c + left[j + 2, k] * one
                e = e + left[j + 3, k] * one
            store(out, j, i, a)
            store(out, j + 1, i, b)
            store(out, j + 2, i, c)
            store(out, j + 3, i, e)


@kernel
def _activations(made, slope, last, bias, out, tiles):
    """Fill out, [1, ids], with the activation of each id, given the hidden layer before PReLU, [width, ids]."""
    for i in range(0, tiles, TILE):
        nothing = zeros(made, 16)
        acc = filled(nothing, bias[0])
        for j in range(len(last)):
            x = load(made, j, i, 16)
            acc = acc + last[j] * above(x, nothing, x, slope[0] * x)
        store(out, 0, i, acc)


@kernel
def _forward(h, matrices, hidden, slope, last, bias, begins, ends, first, order, wide, out, lo, hi):
    """Fill out for the samples of bags lo to hi."""
    width, dim = matrices.shape[1], matrices.shape[2]
    most, broad = (width + _ROWS - 1) // _ROWS * _ROWS, (dim + TILE - 1) // TILE * TILE
    rows, turned = np.zeros((wide, broad), h.dtype), np.zeros((dim, wide), h.dtype)
    matrix, begin, made = np.zeros((most, dim), h.dtype), np.zeros(most, h.dtype), np.empty((most, wide), h.dtype)
    acts, sums = np.empty((1, wide), h.dtype), np.empty((1, broad), h.dtype)
    for bag in range(lo, hi):
        if first[bag] == first[bag + 1]:
            continue
        n = ends[bag] - begins[bag]
        tiles = _laid_out(h, begins[bag], ends[bag], rows, turned)
        for sample in order[first[bag] : first[bag + 1]]:
            _take(matrices[sample], hidden[sample], matrix, begin)
            _product(matrix, turned, begin, dim, made, tiles)
            _activations(made, slope, last, bias, acts, tiles)
            for d in range(0, broad, TILE):
                acc = zeros(h, 16)
                for i in range(n):
                    acc = acc + acts[0, i] * load(rows, i, d, 16)
                store(sums, 0, d, acc)
            for d in range(dim):
                out[sample, d] = sums[0, d]


@kernel
def _backward(
    h, matrices, hidden, slope, last, bias, begins, ends, first, order, wide, grad, of_h, of_matrices, of_hidden,
    of_last, of_both, lo, hi,
):  # fmt: skip
    """Fill the gradients of the samples of bags lo to hi, and add those of their rows to of_h, which is zeros.

    The hidden layer is made again.
    """
    width, dim = matrices.shape[1], matrices.shape[2]
    most, broad = (width + _ROWS - 1) // _ROWS * _ROWS, (dim + TILE - 1) // TILE * TILE
    rows, turned = np.zeros((wide, broad), h.dtype), np.zeros((dim, wide), h.dtype)
    matrix, begin, made = np.zeros((most, dim), h.dtype), np.zeros(most, h.dtype), np.empty((most, wide), h.dtype)
    acts, of_acts = np.empty((1, wide), h.dtype), np.empty((1, wide), h.dtype)
    of_matrix, of_turned = np.empty((most, broad), h.dtype), np.empty((dim, wide), h.dtype)
    nothing_more = np.zeros(most, h.dtype)
    for bag in range(lo, hi):
        if first[bag] == first[bag + 1]:
            continue
        n = ends[bag] - begins[bag]
        tiles = _laid_out(h, begins[bag], ends[bag], rows, turned)
        of_turned[:, :tiles] = 0
        for sample in order[first[bag] : first[bag + 1]]:
            _take(matrices[sample], hidden[sample], matrix, begin)
            _product(matrix, turned, begin, dim, made, tiles)
            _activations(made, slope, last, bias, acts, tiles)
            nothing = zeros(h, 16)
            of_bias, of_slope = zeros(h, 16), zeros(h, 16)
            for i in range(0, tiles, TILE):  # 0 behind the ids, where turned is
                acc = zeros(h, 16)
                for d in range(dim):
                    acc = acc + grad[sample, d] * load(turned, d, i, 16)
                store(of_acts, 0, i, acc)
                of_bias = of_bias + acc
            for j in range(width):
                of_one, of_sum = zeros(h, 16), zeros(h, 16)
                for i in range(0, tiles, TILE):
                    x, of_act = load(made, j, i, 16), load(of_acts, 0, i, 16)
                    low = above(x, nothing, nothing, x)
                    of_one = of_one + of_act * above(x, nothing, x, slope[0] * x)
                    of_x = last[j] * of_act
                    of_slope = of_slope + of_x * low
                    of_x = above(x, nothing, of_x, slope[0] * of_x)
                    of_sum = of_sum + of_x
                    store(made, j, i, of_x)
                of_last[sample, j] = total(of_one)
                of_hidden[sample, j] = total(of_sum)
            made[width:, :tiles] = 0
            of_both[sample, 0] = total(of_slope)
            of_both[sample, 1] = total(of_bias)
            _add_of_rows(matrix, made, grad[sample], acts, of_turned, width, tiles)
            _product(made, rows, nothing_more, n, of_matrix, broad)
            for j in range(width):
                for d in range(dim):
                    of_matrices[sample, j, d] = of_matrix[j, d]
        for i in range(n):
            for d in range(dim):
                of_h[begins[bag] + i, d] += of_turned[d, i]


@kernel
def _add_of_rows(matrix, of_made, grad, acts, of_turned, width, tiles):
    """Add to of_turned, [dim, ids], what a sample gives: the matrix turned times of_made, and grad times acts."""
    dim = matrix.shape[1]
    whole = dim // _ROWS * _ROWS
    for i in range(0, tiles, TILE):
        act = load(acts, 0, i, 16)
        for d in range(0, whole, _ROWS):
            a, b = grad[d] * act, grad[d + 1] * act
            c, e = grad[d + 2] * act, grad[d + 3] * act
            for j in range(width):
                one = load(of_made, j, i, 16)
                a = a + matrix[j, d] * one
                b = b + matrix[j, d + 1] * one
                c = c + matrix[j, d + 2] * one
                e = e + matrix[j, d + 3] * one
            store(of_turned, d, i, load(of_turned, d, i, 16) + a)
            store(of_turned, d + 1, i, load(of_turned, d + 1, i, 16) + b)
            store(of_turned, d + 2, i, load(of_turned, d + 2, i, 16) + c)
            store(of_turned, d + 3, i, load(of_turned, d + 3, i, 16) + e)
        for d in range(whole, dim):
            acc = grad[d] * act
            for j in range(width):
                acc = acc + matrix[j, d] * load(of_made, j, i, 16)
            store(of_turned, d, i, load(of_turned, d, i, 16) + acc)
