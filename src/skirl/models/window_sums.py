"""Sums of the rows of each window, in our own loops: rows that several windows share are not copied."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from skirl.core.once import Windowed
from skirl.models.samples_by_bag import by_stretch
from skirl.tools.jit import kernel
from skirl.tools.threads import run


def window_sums(bags: Windowed) -> Tensor:
    """Return the sum of each window's rows, in their order, starting from 0: [windows, dim].

    The gradient of a row is summed over the windows that have it in ascending order, starting from 0, whatever torch's
    number of threads.

    **Arguments**

    - `bags`: windows of rows on a CPU.
    """
    return _Sums.apply(bags.rows, bags.begins.numpy(), bags.ends.numpy())


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, begins: np.ndarray, ends: np.ndarray) -> Tensor:
        rows = rows.detach().contiguous()
        ctx.shape, ctx.windows = rows.shape, (begins, ends)
        out = torch.zeros(len(begins), rows.shape[1], dtype=rows.dtype)
        run(_add, len(begins), rows.numpy(), begins, ends, out.numpy(), threads=torch.get_num_threads())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        begins, ends = ctx.windows
        out, grad = grad.new_zeros(ctx.shape), grad.contiguous()
        first, order = by_stretch(begins, ends)
        run(
            _add_back, len(first) - 1, grad.numpy(), begins, ends, first, order, out.numpy(),
            threads=torch.get_num_threads(), work=first,
        )  # fmt: skip
        return out, None, None


@kernel
def _add(rows, begins, ends, out, lo, hi):
    """Add the rows of windows lo to hi to out, which is zeros."""
    for window in range(lo, hi):
        for i in range(begins[window], ends[window]):
            for d in range(out.shape[1]):
                out[window, d] += rows[i, d]


@kernel
def _add_back(grad, begins, ends, first, order, out, lo, hi):
    """Add the gradients of the windows of stretches lo to hi to those of their rows, out, which is zeros."""
    for stretch in range(lo, hi):
        for window in order[first[stretch] : first[stretch + 1]]:
            for i in range(begins[window], ends[window]):
                for d in range(out.shape[1]):
                    out[i, d] += grad[window, d]
