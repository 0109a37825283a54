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
from typing import Any

import torch

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, mlp


class DLRM(Model):
    """The model of the paper over any embeddings module; `forward` gives logits.

    Parameters are drawn from torch's generator: call `torch.manual_seed` first for the same model again.

    >>> from types import SimpleNamespace
    >>> from skirl.core.tables import Table
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8), Table("item", rows=50, dim=8)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8))
    >>> model = DLRM(Zeros(), dense_features=4, bottom=(16,), top=(16,))
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    name = "DLRM"

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (1024, 1024, 1024, 256, 128),
    ) -> None:
        """`bottom` and `top` are the hidden layers: after them comes one of the tables' dim, and one of 1."""
        super().__init__()
        dim, features = self._over(embeddings, dense_features, "takes dot products")
        vectors = 1 + features
        self.bottom = mlp(dense_features, *bottom, dim)
        self.top = mlp(dim + vectors * (vectors - 1) // 2, *top, 1)[:-1]  # a logit: no ReLU at the end
        first, second = torch.tril_indices(vectors, vectors, offset=-1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", first * vectors + second, persistent=False)

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DLRM":
        """The sizes that the cache papers train on Criteo Kaggle: 13-512-256-64-dim and 1024-1024-1024-256-128-1."""
        return cls(embeddings, dense_features, **sizes)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DLRM":
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        return cls(embeddings, dense_features, **dict[str, Any](bottom=(32,), top=(64, 32)) | sizes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The logit of each sample's click, [batch]."""
        x = self.bottom(self._dense(batch))
        vectors = torch.cat([x[:, None], self.embeddings(batch.sparse).stacked()], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([x, products.index_select(1, self.pairs)], dim=1)).squeeze(1)
