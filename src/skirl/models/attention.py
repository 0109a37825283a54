"""Attention of samples to the ids of their bag and to themselves, by our own loops that copy nothing of a bag to samples."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.models.history import TILE, SamplesByBag
from skirl.tools.jit import kernel
from skirl.tools.lanes import filled, load, store, total, zeros
from skirl.tools.threads import run


def attend(own: Tensor, of_ids: Tensor, by_bag: SamplesByBag, heads: int) -> Tensor:
    """Return what each sample sees, [batch, width]: the values of its bag's ids and its own, weighted by softmax.

    Gradients of a bag's ids are summed over its samples in ascending order, whatever torch's number of threads.

    - `own`: [batch, 3 * width], each sample's query, key and value.
    - `of_ids`: [ids, 2 * width], the key and the value of each id; or more columns, of which the last are taken.
    """
    return _Attention.apply(own, of_ids, by_bag, heads)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, of_ids: Tensor, by_bag: SamplesByBag, heads: int) -> Tensor:
        own, of_ids = own.detach().contiguous(), of_ids.detach().contiguous()
        batch, width = len(own), own.shape[1] // 3
        # Softmax of the ids of each sample and head, and behind them that of the sample itself.
        weights = torch.empty(batch * heads, by_bag.wide + 1, dtype=own.dtype)
        out = torch.empty(batch, width, dtype=own.dtype)
        bags = len(by_bag.begins)
        run(
            _forward, bags, own.numpy(), of_ids.numpy(), *by_bag[:4], heads, weights.numpy(), out.numpy(),
            threads=torch.get_num_threads(), work=by_bag.first,
        )  # fmt: skip
        ctx.save_for_backward(own, of_ids, weights)
        ctx.by_bag, ctx.heads = by_bag, heads
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        own, of_ids, weights = ctx.saved_tensors
        by_bag = ctx.by_bag
        of_own, of_bags, bags = torch.empty_like(own), torch.zeros_like(of_ids), len(by_bag.begins)
        run(
            _backward, bags, own.numpy(), of_ids.numpy(), *by_bag[:4], ctx.heads, weights.numpy(),
            grad.contiguous().numpy(), of_own.numpy(), of_bags.numpy(),
            threads=torch.get_num_threads(), work=by_bag.first,
        )  # fmt: skip
        return of_own, of_bags, None, None


@kernel
def _turned(of_ids, begin, end, width, keys, values):
    """Fill keys and values, [width, ids], from those of a bag's ids, with zeros up to a whole tile. Return its end."""
    n, at = end - begin, of_ids.shape[1] - 2 * width
    tiles = (n + TILE - 1) // TILE * TILE
    for i in range(n):
        for d in range(width):
            keys[d, i] = of_ids[begin + i, at + d]
            values[d, i] = of_ids[begin + i, at + width + d]
    for d in range(width):
        keys[d, n:tiles] = 0
        values[d, n:tiles] = 0
    return tiles


@kernel
def _forward(own, of_ids, begins, ends, first, order, heads, weights, out, lo, hi):
    width, last = out.shape[1], weights.shape[1] - 1
    each = width // heads
    number = own.dtype.type
    scale = number(1 / np.sqrt(each))
    keys, values = np.empty((width, last), own.dtype), np.empty((width, last), own.dtype)
    for bag in range(lo, hi):
        if first[bag] == first[bag + 1]:
            continue
        n = ends[bag] - begins[bag]
        tiles = _turned(of_ids, begins[bag], ends[bag], width, keys, values)
        for sample in order[first[bag] : first[bag + 1]]:
            for head in range(heads):
                row, low, high = sample * heads + head, head * each, (head + 1) * each
                score = number(0)
                for d in range(low, high):
                    score += scale * own[sample, d] * own[sample, width + d]
                highest = score
                for i in range(0, tiles, TILE):
                    acc = zeros(own, 16)
                    for d in range(low, high):
                        acc = acc + scale * own[sample, d] * load(keys, d, i, 16)
                    store(weights, row, i, acc)
                for i in range(n):
                    highest = max(highest, weights[row, i])
                score = np.exp(score - highest)
                whole = score
                for i in range(n):
                    weights[row, i] = np.exp(weights[row, i] - highest)
                    whole += weights[row, i]
                weights[row, last] = score / whole
                for i in range(n):
                    weights[row, i] /= whole
                weights[row, n:tiles] = 0
                for d in range(low, high):
                    acc = zeros(own, 16)
                    for i in range(0, tiles, TILE):
                        acc = acc + load(weights, row, i, 16) * load(values, d, i, 16)
                    out[sample, d] = total(acc) + weights[row, last] * own[sample, 2 * width + d]


@kernel
def _backward(own, of_ids, begins, ends, first, order, heads, weights, grad, of_own, of_bags, lo, hi):
    """Fill of_own for the samples of bags lo to hi, and add the gradients of their ids to of_bags, which is zeros."""
    width, last = grad.shape[1], weights.shape[1] - 1
    each, at = width // heads, of_ids.shape[1] - 2 * width
    number = own.dtype.type
    scale = number(1 / np.sqrt(each))
    keys, values = np.empty((width, last), own.dtype), np.empty((width, last), own.dtype)
    of_keys, of_values = np.empty((width, last), own.dtype), np.empty((width, last), own.dtype)
    of_scores = np.empty((1, last), own.dtype)
    for bag in range(lo, hi):
        if first[bag] == first[bag + 1]:
            continue
        n = ends[bag] - begins[bag]
        tiles = _turned(of_ids, begins[bag], ends[bag], width, keys, values)
        of_keys[:, :tiles] = 0
        of_values[:, :tiles] = 0
        for sample in order[first[bag] : first[bag + 1]]:
            for head in range(heads):
                row, low, high = sample * heads + head, head * each, (head + 1) * each
                own_weight, of_score = weights[row, last], number(0)
                for d in range(low, high):
                    of_score += grad[sample, d] * own[sample, 2 * width + d]
                both = zeros(own, 16)
                for i in range(0, tiles, TILE):
                    acc = zeros(own, 16)
                    for d in range(low, high):
                        acc = acc + grad[sample, d] * load(values, d, i, 16)
                    store(of_scores, 0, i, acc)
                    both = both + acc * load(weights, row, i, 16)
                mean = total(both) + own_weight * of_score
                for i in range(0, tiles, TILE):
                    weight = load(weights, row, i, 16)
                    store(of_scores, 0, i, weight * (load(of_scores, 0, i, 16) - filled(weight, mean)))
                of_score = own_weight * (of_score - mean)
                for d in range(low, high):
                    query, one = scale * own[sample, d], grad[sample, d]
                    acc = zeros(own, 16)
                    for i in range(0, tiles, TILE):
                        score = load(of_scores, 0, i, 16)
                        acc = acc + score * load(keys, d, i, 16)
                        store(of_keys, d, i, load(of_keys, d, i, 16) + query * score)
                        store(of_values, d, i, load(of_values, d, i, 16) + one * load(weights, row, i, 16))
                    of_own[sample, d] = scale * (total(acc) + of_score * own[sample, width + d])
                    of_own[sample, width + d] = of_score * query
                    of_own[sample, 2 * width + d] = own_weight * one
        for i in range(n):
            for d in range(width):
                of_bags[begins[bag] + i, at + d] = of_keys[d, i]
                of_bags[begins[bag] + i, at + width + d] = of_values[d, i]
