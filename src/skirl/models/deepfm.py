"""DeepFM: a factorisation machine and an MLP over the same vectors (Guo et al., arXiv 1703.04247).

    fields           every id feature: the vector v and the first-order weight w of its row
                     every dense feature x_k: x_k times a vector and a weight of its own
    first order      sum of all w
    second order     dot products of all pairs of fields, summed: 1/2 (|sum v|^2 - sum |v|^2)
    deep             all v side by side -> MLP
    logit            first + second order + deep

The identity of the second order makes 39 additions of vectors out of 741 dot products. A field of a dense feature is the
value times a vector, as the paper has it, so that dense features interact too; buckets of ids, its alternative, are for
the data to make. Unlike in DLRM nothing weighs one pair against another: what pairs are worth is all in the vectors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, FirstOrder, last, linear, mlp


class DeepFM(FirstOrder):
    """The model of the paper over any embeddings module; `forward` gives logits.

    Dropout draws from torch's generator, whose state `skirl.save` keeps.

    >>> from types import SimpleNamespace
    >>> from skirl.core.tables import Table
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8 + 1), Table("item", rows=50, dim=8 + 1)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8 + 1))
    >>> model = DeepFM(Zeros(), dense_features=4, deep=(16,))
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    name = "DeepFM"

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        deep: Sequence[int] = (64, 64, 64),
        dropout: float = 0.5,
    ) -> None:
        """`deep`: the hidden layers; `dropout`: the share of each that a step leaves out."""
        super().__init__()
        dim, features = self._over(embeddings, dense_features, "takes dot products")
        self.dense_weights = nn.Parameter(torch.zeros(dense_features))
        self.dense_vectors = nn.Parameter(torch.randn(dense_features, dim) * 0.01)
        self.deep = mlp((features + dense_features) * dim, *deep, dropout=dropout)
        self.head = linear(last(deep, (features + dense_features) * dim), 1)

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DeepFM":
        """The sizes that the cache papers train on Criteo Kaggle: three hidden layers of 64, dropout 0.5."""
        return cls(embeddings, dense_features, **sizes)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DeepFM":
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        return cls(embeddings, dense_features, **dict[str, Any](deep=(32, 16), dropout=0.1) | sizes)

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        vectors, weights = self._rows(batch)
        dense = self._dense(batch)
        fields = torch.cat([vectors, dense[:, :, None] * self.dense_vectors], dim=1)
        first = weights.sum(dim=1) + dense @ self.dense_weights
        second = (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1) / 2
        return first + second + self.head(self.deep(fields.flatten(1))).squeeze(1)
