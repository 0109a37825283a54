"""Arranges samples that share a bag side by side, so that one product computes what all of them need from the bag."""

from typing import NamedTuple

import torch
from torch import Tensor

from skirl.core.once import Distinct, expand


class Seats(NamedTuple):
    """Samples that share a bag, side by side at tables of a few seats each; one product serves a table.

    Copying a bag's values to every sample instead would often cost more than computing with them.
    """

    bag: Tensor
    """int64 [tables]: the bag of each table. The first tables are one per bag; further tables follow for bags with more
    samples than seats."""
    at: Tensor
    """int64 [batch]: the seat of each sample, numbered over all tables."""
    bags: int
    size: int
    """Number of seats at a table."""

    @classmethod
    def of(cls, bags: Distinct, roomy: float = 1.0) -> "Seats":
        """Seat the samples of a batch, those of a bag in their order."""
        inverse, samples, count = bags.inverse, len(bags.inverse), bags.bags
        if bags.plain:
            return cls(inverse, inverse, count, 1)
        size = max(1, int(roomy * samples / max(1, count)))
        guests = inverse.bincount(minlength=count)
        order = inverse.argsort(stable=True)
        rank = torch.empty_like(order)  # each sample's index among those of its bag
        rank[order] = torch.arange(samples, device=order.device) - (guests.cumsum(0) - guests)[inverse[order]]
        more = ((guests - 1).clamp(min=0) // size).to(torch.int64)  # tables after the first
        own = torch.arange(count, device=inverse.device)
        behind = count + (more.cumsum(0) - more)[inverse] + rank // size - 1
        table = torch.where(rank < size, inverse, behind)
        return cls(torch.cat([own, own.repeat_interleave(more)]), table * size + rank % size, count, size)

    def take(self, of_samples: Tensor) -> Tensor:
        """Seat the values of samples: [batch, ..] -> [tables, seats, ..], with zeros at empty seats."""
        room = of_samples.new_zeros(len(self.bag) * self.size, *of_samples.shape[1:])
        return room.index_copy(0, self.at, of_samples).unflatten(0, (len(self.bag), self.size))

    def leave(self, seated: Tensor) -> Tensor:
        """Undo `take`: [tables, seats, ..] -> [batch, ..]."""
        return seated.flatten(0, 1).index_select(0, self.at)

    def for_tables(self, of_bags: Tensor) -> Tensor:
        """Copy the values of bags to their tables: [bags, ..] -> [tables, ..]."""
        return of_bags if len(self.bag) == self.bags else expand(of_bags, self.bag)
