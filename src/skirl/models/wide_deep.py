"""Wide & Deep: a linear model that memorises and an MLP that generalises (Cheng et al., arXiv 1606.07792)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, FirstOrder, last, linear, mlp


class WideDeep(FirstOrder):
    """Wide & Deep over any embeddings module; `forward` returns logits.

        ids              -> rows -> vectors v [B, F, d] and first-order weights w [B, F]
        wide             sum of w                                                    one weight per id
        deep             [dense, all v] -> MLP -> linear                             generalises over ids
        logit            wide + deep

    **Arguments** beside those of `Model`

    - `embeddings`: looks up ids; the dim of its tables is that of the vectors plus one, for the first-order weight.
    - `deep`: hidden layers; three of 256 by default, as in the cache papers.
    """

    name = "Wide & Deep"
    small: ClassVar = {"deep": (32, 16)}

    def __init__(self, embeddings: Embeddings, dense_features: int = 13, deep: Sequence[int] = (256, 256, 256)) -> None:
        super().__init__(embeddings, dense_features)
        width = dense_features + self.vectors * self.dim
        self.deep = mlp(width, *deep)
        self.head = linear(last(deep, width), 1)

    def forward(self, batch: Batch) -> Tensor:
        vectors, weights = self._rows(batch)
        deep = self.deep(torch.cat([self._dense(batch), vectors.flatten(1)], dim=1))
        return weights.sum(dim=1) + self.head(deep).squeeze(1)
