"""Deep & Cross as the cache papers train it: DLRM with cross layers in the place of dot products (arXiv 1708.05123).

    dense [B, k]  -> bottom MLP -> x [B, D]
    ids           -> embeddings -> e [B, F, D]
    x beside all e -> cross layers of low rank -> top MLP -> logit [B]

The first paper's cross layer is x0 (w . x) + b + x: a W of rank 1 with equal rows in what `CrossNetwork` (dcnv2.py)
computes. The cache papers give it rank 8: 20,736 weights a layer over 27 vectors of 48, where a W of full rank would have
1.7 million. Where the first paper runs cross layers and MLP side by side, they put one on the other, and dense
features enter through an MLP as in DLRM; without both, and with any rank, it is `DCNv2`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, mlp
from skirl.models.dcnv2 import CrossNetwork


class DeepCross(Model):
    """Bottom MLP, cross layers, top MLP over any embeddings module; `forward` gives logits.

    >>> from types import SimpleNamespace
    >>> from skirl.core.tables import Table
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8), Table("item", rows=50, dim=8)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8))
    >>> model = DeepCross(Zeros(), dense_features=4, bottom=(16,), rank=3, top=(16,))
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    name = "Deep & Cross"

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        bottom: Sequence[int] = (1024, 512, 256, 64),
        cross: int = 2,
        rank: int | None = 8,
        top: Sequence[int] = (1024, 512, 256),
    ) -> None:
        """`bottom` and `top` are the hidden layers: after them comes one of the tables' dim, and one of 1.

        `rank`: of the cross layers' matrices, full if None.
        """
        super().__init__()
        dim, features = self._over(embeddings, dense_features, "joins vectors of one dim")
        width = (1 + features) * dim
        self.bottom = mlp(dense_features, *bottom, dim)
        self.cross = CrossNetwork(width, cross, rank)
        self.top = mlp(width, *top, 1)[:-1]  # a logit: no ReLU at the end

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DeepCross":
        """The sizes of the cache papers: 13-1024-512-256-64-dim, two cross layers of rank 8, 1024-512-256-1."""
        return cls(embeddings, dense_features, **sizes)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DeepCross":
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        return cls(embeddings, dense_features, **dict[str, Any](bottom=(32,), rank=4, top=(32, 16)) | sizes)

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        x = self.bottom(self._dense(batch))
        x0 = torch.cat([x, self.embeddings(batch.sparse).stacked().flatten(1)], dim=1)
        return self.top(self.cross(x0)).squeeze(1)
