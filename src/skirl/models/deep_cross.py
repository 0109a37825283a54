"""Deep & Cross as the cache papers train it: DLRM with cross layers in place of dot products (arXiv 1708.05123).

The cross layers have rank 8 instead of the original paper's 1, and the MLP follows them instead of running in parallel.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, mlp
from skirl.models.dcnv2 import CrossNetwork


class DeepCross(Model):
    """Bottom MLP, cross layers, top MLP over any embeddings module; `forward` returns logits.

    The defaults are the sizes of the cache papers.

        dense [B, k]   -> bottom MLP -> x [B, D]
        ids            -> embeddings -> e [B, F, D]
        [x, all e]     -> cross layers of low rank -> top MLP -> logit [B]

    **Arguments**

    - `embeddings`: looks up ids; all its tables have one dim.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `bottom`: hidden layers for the dense features, by default as in the cache papers; one of the tables' dim follows them.
    - `cross`: number of cross layers; 2 as in these papers.
    - `rank`: rank of the cross layers' matrices; None: full. With the default of 8, a layer over 27 vectors of 48 has
      20,736 weights; at full rank it has 1.7 million.
    - `top`: hidden layers after the cross layers, by default as in these papers; one of width 1, the logit, follows them.
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
        self.top = mlp(width, *top, 1)[:-1]  # no ReLU after the logit

    def forward(self, batch: Batch) -> Tensor:
        x = self.bottom(self._dense(batch))
        x0 = torch.cat([x, self.embeddings(batch.sparse).stacked().flatten(1)], dim=1)
        return self.top(self.cross(x0)).squeeze(1)
