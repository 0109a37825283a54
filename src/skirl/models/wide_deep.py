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

    **Arguments**

    - `embeddings`: looks up ids; the dim of its tables is that of the vectors plus one, for the first-order weight.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `deep`: hidden layers; three of 256 by default, as in the cache papers.
    - `rows_in_deep`: whether the hidden layers take the vectors: True, as in the paper. With False, as in the cache papers,
      they take only the dense features, and the last linear layer takes their output and the vectors.
    """

    name = "Wide & Deep"
    small: ClassVar = {"deep": (32, 16)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        deep: Sequence[int] = (256, 256, 256),
        rows_in_deep: bool = True,
    ) -> None:
        super().__init__(embeddings, dense_features)
        width = self.vectors * self.dim
        self.rows_in_deep = rows_in_deep
        before, behind = (width, 0) if rows_in_deep else (0, width)
        self.deep = mlp(dense_features + before, *deep)
        self.head = linear(last(deep, dense_features + before) + behind, 1)

    def forward(self, batch: Batch) -> Tensor:
        vectors, weights = self._rows(batch)
        dense, vectors = self._dense(batch), vectors.flatten(1)
        if self.rows_in_deep:
            deep = self.deep(torch.cat([dense, vectors], dim=1))
        else:
            deep = torch.cat([self.deep(dense), vectors], dim=1)
        return weights.sum(dim=1) + self.head(deep).squeeze(1)
