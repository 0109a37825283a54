"""Sums of rows by list, in the order of the ids."""

import torch
from torch import Tensor

from skirl.core.batch import moved
from skirl.core.once import Distinct


def list_sums(lists: Distinct) -> Tensor:
    """Return the sum of each list's rows, [lists, dim]."""
    lengths = lists.offsets.diff()
    return sums(lists.rows, owners(lengths, lists.rows.device), len(lengths))


def owners(lengths: Tensor, at: torch.device) -> Tensor:
    """Return the sample (or bag) of each id, on device `at`; lengths may be on the host."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), at)


def sums(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sum rows by sample, in the order of the ids."""
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)
