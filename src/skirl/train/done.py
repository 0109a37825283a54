"""A step of training after its update: what a loop hears of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skirl.core.batch import Batch


@dataclass(slots=True)
class Done:
    """One step after its update."""

    batches: list[Batch]
    """Its samples, those of this trainer: one batch for each shard."""
    logits: Tensor
    labels: Tensor
    losses: Tensor
    """Of each shard,"""
    loss_tensor: Tensor
    """and their mean, on the device; who asks for the number waits until the step is done there."""

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
        return Done(batches, logits[0], batches[0].labels, losses[0].reshape(1), losses[0])
    each = torch.stack(losses)
    return Done(batches, torch.cat(logits), torch.cat([batch.labels for batch in batches]), each, each.mean())
