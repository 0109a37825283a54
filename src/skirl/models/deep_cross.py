"""Deep & Cross as the cache papers train it: DLRM with cross layers in the place of dot products (arXiv 1708.05123).

The cross layers have rank 8 where the first paper's have rank 1, and the MLP stands behind them, not beside.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, mlp
from skirl.models.dcnv2 import CrossNetwork


class DeepCross(Model):
    """Bottom MLP, cross layers, top MLP over any embeddings module; `forward` gives logits.

    The defaults are the sizes of the cache papers.

        dense [B, k]   -> bottom MLP -> x [B, D]
        ids            -> embeddings -> e [B, F, D]
        x beside all e -> cross layers of low rank -> top MLP -> logit [B]

    **Arguments**

    - `embeddings`: looks ids up; all its tables have one dim.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `bottom`: hidden layers that dense features go through; one of the tables' dim follows them.
    - `cross`: how many cross layers.
    - `rank`: rank of the cross layers' matrices; None: full. 8 by default: over 27 vectors of 48 a layer then has 20,736
      weights, and 1.7 million at full rank.
    - `top`: hidden layers behind the cross layers; one of width 1, the logit, follows them.
    """

    name = "Deep & Cross"
    small: ClassVar = {"bottom": (32,), "rank": 4, "top": (32, 16)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        bottom: Sequence[int] = (1024, 512, 256, 64),
        cross: int = 2,
        rank: int | None = 8,
        top: Sequence[int] = (1024, 512, 256),
    ) -> None:
        super().__init__(embeddings, dense_features)
        width = (1 + self.vectors) * self.dim
        self.bottom = mlp(dense_features, *bottom, self.dim)
        self.cross = CrossNetwork(width, cross, rank)
        self.top = mlp(width, *top, 1)[:-1]  # a logit: no ReLU at the end

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        x = self.bottom(self._dense(batch))
        x0 = torch.cat([x, self.embeddings(batch.sparse).stacked().flatten(1)], dim=1)
        return self.top(self.cross(x0)).squeeze(1)
