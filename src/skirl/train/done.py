"""A step of training after its update: what a loop hears of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skirl.core.batch import Batch


@dataclass(slots=True)
class Done:
    """One step after its update."""

    batches: list[Batch]
    """Those of this trainer: one for each of its shards."""
    logits: Tensor
    labels: Tensor
    """Of all trainers, on the one that shows and writes what comes of the run; none on the others."""
    losses: Tensor
    """Of each shard,"""
    loss_tensor: Tensor
    """and their mean, on the device; who asks for the number waits until the step is done there."""
    samples: int
    """Of all trainers."""
    finite: bool = True
    """Whether all logits are, as far as others have said so."""

    @property
    def loss(self) -> float:
        """The mean over the samples."""
        return self.loss_tensor.item()


def whole(batches: list[Batch], logits: list[Tensor], losses: list[Tensor]) -> Done:
    """A step out of its shards; its loss is their mean.

    **Arguments**

    - `batches`, `logits`, `losses`: of each shard.
    """
    if len(batches) == 1:
        return Done(batches, logits[0], batches[0].labels, losses[0].reshape(1), losses[0], len(batches[0].labels))
    each, labels = torch.stack(losses), torch.cat([batch.labels for batch in batches])
    return Done(batches, torch.cat(logits), labels, each, each.mean(), len(labels))
