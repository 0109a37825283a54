"""Cross layers, which multiply the input with itself: DCNv2, of full or low rank (Wang et al., arXiv 2008.13535), and Deep &
Cross as the cache papers train it, DLRM with cross layers in place of dot products (arXiv 1708.05123)."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, last, linear, mlp

Structure = Literal["stacked", "parallel"]


class CrossNetwork(nn.Module):
    """Cross layers over vectors of one width."""

    def __init__(self, width: int, layers: int, rank: int | None = None) -> None:
        super().__init__()
        if rank is not None and not 1 <= rank <= width:
            raise ValueError(f"rank is {rank}: set it between 1 and {width}, the width, or to None for full rank")
        self.layers = nn.ModuleList(
            linear(width, width) if rank is None
            else nn.Sequential(linear(width, rank, bias=False), linear(rank, width))
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(Model):
    """DCNv2 over any embeddings module; `forward` returns logits. The defaults are the paper's sizes.

        x0               [dense, all vectors]
        cross layer      x_{l+1} = x0 * (W x_l + b) + x_l           each layer multiplies in one more feature
        stacked          x0 -> cross layers -> MLP -> linear
        parallel         [x0 -> cross layers, x0 -> MLP] -> linear
        rank r           W = V U, where U has r rows

    **Arguments** beside those of `Model`

    - `cross`: number of cross layers; 3 as in the paper.
    - `rank`: rank of their matrices; None: full, as in the paper's main results. With 13 dense features and 26 vectors
      of 48, a layer of full rank has 1.6 million weights, and a tenth of that with rank 64.
    - `deep`: hidden layers; two of 768 as in the paper.
    - `structure`: whether the hidden layers follow the cross layers ("stacked", the paper's choice for Criteo) or run in
      parallel ("parallel").
    """

    name = "DCNv2"
    small: ClassVar = {"cross": 2, "rank": 4, "deep": (32, 16), "structure": "parallel"}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        cross: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (768, 768),
        structure: Structure = "stacked",
    ) -> None:
        super().__init__(embeddings, dense_features)
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is {structure!r}: set it to 'stacked' or 'parallel'")
        width = dense_features + self.vectors * self.dim
        self.structure = structure
        self.cross = CrossNetwork(width, cross, rank)
        self.deep = mlp(width, *deep)
        self.head = linear(last(deep, width) + (width if structure == "parallel" else 0), 1)

    def forward(self, batch: Batch) -> Tensor:
        x0 = torch.cat([self._dense(batch), self.embeddings(batch.sparse).stacked().flatten(1)], dim=1)
        crossed = self.cross(x0)
        if self.structure == "stacked":
            return self.head(self.deep(crossed)).squeeze(1)
        return self.head(torch.cat([crossed, self.deep(x0)], dim=1)).squeeze(1)


class DeepCross(Model):
    """Bottom MLP, cross layers, top MLP over any embeddings module; `forward` returns logits.

    The defaults are the sizes of the cache papers. The cross layers have rank 8 instead of the original paper's 1, and the
    MLP follows them instead of running in parallel.

        dense [B, k]   -> bottom MLP -> x [B, D]
        ids            -> embeddings -> e [B, F, D]
        [x, all e]     -> cross layers of low rank -> top MLP -> logit [B]

    **Arguments** beside those of `Model`

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
