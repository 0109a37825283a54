"""Rows of sequences in the shapes that models take: a nested tensor of torch, or pooled. (`once.padded` pads them.)"""

import numpy as np
import torch
from torch import Tensor

from skirl.core.tables import Pooling


def nested(flat: Tensor, offsets: np.ndarray) -> Tensor:
    """Return the rows of all samples, `[ids, dim]`, as a nested tensor of torch's jagged layout, `[batch, (ids), dim]`.

    offsets: int [batch + 1], where each sample begins.

    >>> nested(torch.tensor([[1.0], [2.0], [3.0]]), np.array([0, 1, 3])).unbind()[1].tolist()
    [[2.0], [3.0]]
    """
    lengths = np.diff(offsets)
    begins = torch.from_numpy((offsets - offsets[0]).astype(np.int64)).to(flat.device)
    return torch.nested.nested_tensor_from_jagged(
        flat, begins, min_seqlen=int(lengths.min(initial=0)), max_seqlen=int(lengths.max(initial=0))
    )


def pooled(flat: Tensor, offsets: np.ndarray, mode: Pooling) -> Tensor:
    """Sum or average the rows of all samples, `[ids, dim]`, by sample: `[batch, dim]`, zeros for a sample without ids.

    offsets: int [batch + 1], where each sample begins.

    >>> pooled(torch.tensor([[1.0], [2.0], [4.0]]), np.array([0, 1, 1, 3]), "mean").squeeze(1).tolist()
    [1.0, 0.0, 3.0]
    """
    lengths = torch.from_numpy(np.diff(offsets).astype(np.int64)).to(flat.device)
    # Sums in order, so that a run repeats bit for bit on a GPU. The lengths need no check.
    sums = torch.segment_reduce(flat, "sum", lengths=lengths, initial=0.0, unsafe=True)
    return sums if mode == "sum" else sums / lengths.clamp(min=1).unsqueeze(1)
