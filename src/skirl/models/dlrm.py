"""DLRM: dense features and id features meet in their dot products (Naumov et al., arXiv 1906.00091).

    dense [B, k]  -> bottom MLP -> x [B, D]
    ids           -> embeddings -> e [B, F, D]
    all pairs of {x, e_1 .. e_F} -> dot products [B, F (F + 1) / 2]
    x beside the dot products -> top MLP -> logit [B]

For 26 features, D = 48 and batches of 16,384 the products are 23 MB where the concatenated vectors would be 85 MB and
the first top layer 3.2 times as wide. Factorisation machines add the products up to one number; DLRM lets the MLP weigh
them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from skirl.batch import Batch
from skirl.tables import Table


class Embeddings(Protocol):
    """What DLRM needs of an embeddings module: its tables, and ids -> something whose `stacked()` is [B, F, D]."""

    @property
    def tables(self) -> Sequence[Table]: ...
    def __call__(self, sparse: Any, /) -> Any: ...


class DLRM(nn.Module):
    """The model of the paper over any embeddings module; `forward` gives logits.

    Parameters are drawn from torch's generator: call `torch.manual_seed` first for the same model again.

    >>> from types import SimpleNamespace
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8), Table("item", rows=50, dim=8)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8))
    >>> model = DLRM(Zeros(), dense_features=4, bottom=(16,), top=(16,))
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (1024, 1024, 1024, 256, 128),
    ) -> None:
        """`bottom` and `top` are the hidden layers: after them comes one of the tables' dim, and one of 1."""
        super().__init__()
        dims = {table.dim for table in embeddings.tables}
        if len(dims) != 1:
            raise ValueError(f"DLRM takes dot products, tables have dims {sorted(dims)}: set one dim for all tables")
        dim = dims.pop()
        vectors = 1 + sum(len(table.features) for table in embeddings.tables)
        self.embeddings = embeddings
        self.bottom = _mlp(dense_features, *bottom, dim)
        self.top = _mlp(dim + vectors * (vectors - 1) // 2, *top, 1)[:-1]  # a logit: no ReLU at the end
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13) -> "DLRM":
        """The sizes that the cache papers train on Criteo Kaggle: 13-512-256-64-dim and 1024-1024-1024-256-128-1."""
        return cls(embeddings, dense_features)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13) -> "DLRM":
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        return cls(embeddings, dense_features, bottom=(32,), top=(64, 32))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logit of each sample's click, [batch]."""
        x = self.bottom(batch.dense.to(next(self.bottom.parameters())))  # to where the model is, in its dtype
        vectors = torch.cat([x[:, None], self.embeddings(batch.sparse).stacked()], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], dim=1)).squeeze(1)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean binary cross-entropy of a batch."""
        logits = self(batch)
        return functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits))


def _mlp(*sizes: int) -> nn.Sequential:
    """Linear and ReLU for each pair of sizes, with DLRM's own initial values."""
    layers = nn.Sequential()
    for n, m in pairwise(sizes):
        linear = nn.Linear(n, m)
        nn.init.normal_(linear.weight, std=(2 / (m + n)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / m) ** 0.5)
        layers.append(linear).append(nn.ReLU())
    return layers
