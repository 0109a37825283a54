"""A training step after its update, as a loop sees it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skirl.core.batch import Batch


@dataclass(slots=True)
class Done:
    """A training step after its update."""

    batches: list[Batch]
    """This trainer's batches, one for each of its shards."""
    logits: Tensor
    labels: Tensor
    """Logits and labels of all trainers, on the first of them; empty on the others."""
    losses: Tensor
    """The loss of each shard, over all trainers."""
    loss_tensor: Tensor
    """The mean of the losses, on the device. Reading its value waits until the step is done there."""
    samples: int
    """Number of samples, over all trainers."""
    finite: bool = True
    """False if another trainer has said that some of its logits are not finite."""

    @property
    def loss(self) -> float:
        """The mean loss over the samples."""
        return self.loss_tensor.item()


def whole(batches: list[Batch], logits: list[Tensor], losses: list[Tensor]) -> Done:
    """Return a step made of its shards, whose loss is their mean."""
    if len(batches) == 1:
        return Done(batches, logits[0], batches[0].labels, losses[0].reshape(1), losses[0], len(batches[0].labels))
    each, labels = torch.stack(losses), torch.cat([batch.labels for batch in batches])
    return Done(batches, torch.cat(logits), labels, each, each.mean(), len(labels))
