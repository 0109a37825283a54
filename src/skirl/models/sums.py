"""Sums of rows by list, in the order of the ids."""

import torch
from torch import Tensor

from skirl.core.batch import moved
from skirl.core.once import Windowed
from skirl.models.loops import fit
from skirl.models.window_sums import window_sums


def list_sums(lists: Windowed) -> Tensor:
    """Return the sum of each list's rows, [lists, dim]. Where our loops cannot take windows, their rows are copied.

    **Arguments**

    - `lists`: the distinct lists of a feature.
    """
    if fit(lists.rows) and not lists.apart:
        return window_sums(lists)
    lengths = lists.ends - lists.begins
    return sums(lists.distinct().rows, owners(lengths, lists.rows.device), len(lengths))


def owners(lengths: Tensor, at: torch.device) -> Tensor:
    """Return the sample (or bag) of each id, on device `at`; lengths may be on the host."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), at)


def sums(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sum rows by sample, in the order of the ids."""
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)
