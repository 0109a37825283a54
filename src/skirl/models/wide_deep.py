"""Wide & Deep: a linear model that memorises beside an MLP that generalises (Cheng et al., arXiv 1606.07792)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, FirstOrder, last, linear, mlp


class WideDeep(FirstOrder):
    """Wide & Deep over any embeddings module; `forward` gives logits.

        ids              -> rows -> vectors v [B, F, d] and first-order weights w [B, F]
        wide             sum of w                                                    one weight per id
        deep             dense beside all v -> MLP -> one linear                     generalises over ids
        logit            wide + deep

    **Arguments**

    - `embeddings`: looks ids up; its tables have the dim of the vectors and one more, for the first-order weight.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `deep`: hidden layers; three of 256 by default, as the cache papers have them.
    - `rows_in_deep`: whether the hidden layers take the vectors, as the paper has it. False, as in the cache papers: they
      take the dense features alone, and the last linear layer takes the vectors beside what they give.
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
        """The logit of each sample's click, [batch]."""
        vectors, weights = self._rows(batch)
        dense, vectors = self._dense(batch), vectors.flatten(1)
        if self.rows_in_deep:
            deep = self.deep(torch.cat([dense, vectors], dim=1))
        else:
            deep = torch.cat([self.deep(dense), vectors], dim=1)
        return weights.sum(dim=1) + self.head(deep).squeeze(1)
