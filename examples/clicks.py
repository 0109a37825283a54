"""A stream of clicks for the examples: a user, the items clicked before and the items bought before."""

from collections.abc import Iterator

import torch

import skirl
from skirl.core.initial import first_rows

USERS, ITEMS = 100_000, 500_000


class Clicks:
    """Batches of ids and labels. Every pass yields the same batches."""

    def __init__(self, batches: int, size: int = 256, seed: int = 0) -> None:
        self.batches, self.size, self.seed = batches, size, seed

    def __iter__(self) -> Iterator[skirl.Batch]:
        chance = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            lengths = torch.cat([torch.ones(self.size), torch.randint(0, 5, (2 * self.size,), generator=chance)]).long()
            users = _skewed(self.size, USERS, chance)
            items = _skewed(int(lengths[self.size :].sum()), ITEMS, chance)
            ids = skirl.KeyedJagged(["user", "clicked", "bought"], torch.cat([users, items]), lengths=lengths)
            labels = ((users * 2654435761) % 1000 < 300).float()  # some users always click, whatever they see
            yield skirl.Batch(torch.empty(self.size, 0), ids, labels)


def start_as_skirl(*tables: torch.nn.EmbeddingBag) -> None:
    """Give tables the initial values that skirl gives its first, second, ... table: uniform up to 1 / sqrt(rows).

    nn.EmbeddingBag draws from a normal distribution with standard deviation 1, which is far from a good start.
    """
    for number, table in enumerate(tables):
        rows, dim = table.weight.shape
        keys = (number << 48) + torch.arange(rows)
        table.weight.data = torch.from_numpy(first_rows(keys, skirl.Uniform(rows**-0.5), dim, seed=0))


def _skewed(count: int, rows: int, chance: torch.Generator) -> torch.Tensor:
    """Draw `count` rows, so that a few rows take most accesses, as in real logs."""
    return (rows ** torch.rand(count, generator=chance, dtype=torch.float64)).long() - 1
