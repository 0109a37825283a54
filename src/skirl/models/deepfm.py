"""DeepFM: a factorisation machine and an MLP over the same vectors (Guo et al., arXiv 1703.04247)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, FirstOrder, last, linear, mlp


class DeepFM(FirstOrder):
    """DeepFM over any embeddings module; `forward` returns logits. The defaults are the sizes of the cache papers.

        fields           every id feature: the vector v and the first-order weight w of its row
                         every dense feature x_k: x_k times a vector and a weight of its own
        first order      sum of all w
        second order     sum of the dot products of all pairs of fields: 1/2 (|sum v|^2 - sum |v|^2)
        deep             all v, concatenated -> MLP -> linear
        logit            first order + second order + deep

    **Arguments** beside those of `Model`

    - `embeddings`: looks up ids; the dim of its tables is that of the vectors plus one, for the first-order weight.
    - `deep`: hidden layers; three of 64 as in the cache papers.
    - `dropout`: share of each hidden layer that dropout zeroes in a step; 0.5 as in the paper. It draws from torch's
      generator, whose state `skirl.save` keeps.
    """

    name = "DeepFM"
    small: ClassVar = {"deep": (32, 16), "dropout": 0.1}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        deep: Sequence[int] = (64, 64, 64),
        dropout: float = 0.5,
    ) -> None:
        super().__init__(embeddings, dense_features)
        width = (self.vectors + dense_features) * self.dim
        self.dense_weights = nn.Parameter(torch.zeros(dense_features))
        self.dense_vectors = nn.Parameter(torch.randn(dense_features, self.dim) * 0.01)
        self.deep = mlp(width, *deep, dropout=dropout)
        self.head = linear(last(deep, width), 1)

    def forward(self, batch: Batch) -> Tensor:
        vectors, weights = self._rows(batch)
        dense = self._dense(batch)
        fields = torch.cat([vectors, dense[:, :, None] * self.dense_vectors], dim=1)
        first = weights.sum(dim=1) + dense @ self.dense_weights
        second = (fields.sum(dim=1).square() - fields.square().sum(dim=1)).sum(dim=1) / 2
        return first + second + self.head(self.deep(fields.flatten(1))).squeeze(1)
