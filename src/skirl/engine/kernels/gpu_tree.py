"""The loop of tree.py on a GPU, in Triton: each stretch is summed by itself, then they are added up round by round."""

# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# (Triton's types: an annotated number, a function that returns a tuple.)

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from skirl.engine.kernels.gpu_math import block, launch
from skirl.engine.kernels.gpu_update import add_partials, sum_stretches


def sums(
    group_start: torch.Tensor, group_pos: torch.Tensor, bag_of: torch.Tensor, scale: torch.Tensor, grads: torch.Tensor,
    live: torch.Tensor, stretches: torch.Tensor, runs: torch.Tensor, rounds: Sequence[int], partial: torch.Tensor,
    marks: torch.Tensor,
) -> None:  # fmt: skip
    """Sum the gradients of distinct rows into the first rows of `partial`, as tree.sums does over all rows.

    - `live`: bool or uint8 [features]; empty if all have a gradient.
    - `partial`: contiguous, [m, dim] for m stretches, in the dtype of `grads`.
    - `marks`: int32 [m + rows]: the first receive how many positions of each row had a gradient.
    """
    dim = grads.shape[1]
    sum_stretches(group_start, group_pos, bag_of, scale, grads, live, stretches, partial, marks)
    shape = block(dim)
    for lo, hi in pairwise(rounds):
        launch(_add_runs, hi - lo, partial, marks, runs[lo:hi], hi - lo, stride=dim, dim=dim, **shape)


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
