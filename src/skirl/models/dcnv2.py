"""DCNv2: layers that multiply the input with itself, of full or low rank (Wang et al., arXiv 2008.13535).

    x0               dense beside all rows' vectors
    cross layer      x_{l+1} = x0 * (W x_l + b) + x_l           a product of one more feature with each layer
    stacked          x0 -> cross layers -> MLP -> linear
    parallel         (x0 -> cross layers) beside (x0 -> MLP) -> linear
    rank r           W = V U, with U of r rows

For 13 dense and 26 id features of 48 numbers x0 has 1,261, and a W of full rank 1.6 million weights; of rank 64 it is a
tenth. A mixture of several low-rank W behind a gate, the paper's third form, is not built: two more numbers to choose,
and with one expert it is the low-rank form here.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, last, linear, mlp

Structure = Literal["stacked", "parallel"]


class CrossNetwork(nn.Module):
    """Cross layers over vectors of one width.

    >>> CrossNetwork(width=6, layers=2, rank=3)(torch.ones(5, 6)).shape
    torch.Size([5, 6])
    """

    def __init__(self, width: int, layers: int, rank: int | None = None) -> None:
        """rank: of each layer's matrix; full if None."""
        super().__init__()
        if rank is not None and not 1 <= rank <= width:
            raise ValueError(f"rank is {rank}: set it between 1 and {width}, the width, or to None for full rank")
        self.layers = nn.ModuleList(
            linear(width, width) if rank is None
            else nn.Sequential(linear(width, rank, bias=False), linear(rank, width))
            for _ in range(layers)
        )  # fmt: skip

    def forward(self, x0: Tensor) -> Tensor:
        """[batch, width] -> [batch, width]."""
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x


class DCNv2(Model):
    """The model of the paper over any embeddings module; `forward` gives logits.

    >>> from types import SimpleNamespace
    >>> from skirl.core.tables import Table
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8), Table("item", rows=50, dim=8)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8))
    >>> model = DCNv2(Zeros(), dense_features=4, cross=2, rank=3, deep=(16,), structure="parallel")
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    name = "DCNv2"

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        cross: int = 3,
        rank: int | None = None,
        deep: Sequence[int] = (768, 768),
        structure: Structure = "stacked",
    ) -> None:
        """`cross`: how many cross layers; `rank`: of their matrices, full if None; `deep`: the hidden layers."""
        super().__init__()
        if structure not in ("stacked", "parallel"):
            raise ValueError(f"structure is {structure!r}: set it to 'stacked' or 'parallel'")
        dim, features = self._over(embeddings, dense_features, "joins vectors of one dim")
        width = dense_features + features * dim
        self.structure = structure
        self.cross = CrossNetwork(width, cross, rank)
        self.deep = mlp(width, *deep)
        self.head = linear(last(deep, width) + (width if structure == "parallel" else 0), 1)

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DCNv2":
        """Stacked, three cross layers of full rank, hidden layers of 768-768; the cache papers do not train it."""
        return cls(embeddings, dense_features, **sizes)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "DCNv2":
        """Two parallel cross layers of rank 4: a step of 1,024 samples takes milliseconds on one core."""
        return cls(
            embeddings,
            dense_features,
            **dict[str, Any](cross=2, rank=4, deep=(32, 16), structure="parallel") | sizes,
        )

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        x0 = torch.cat([self._dense(batch), self.embeddings(batch.sparse).stacked().flatten(1)], dim=1)
        crossed = self.cross(x0)
        if self.structure == "stacked":
            return self.head(self.deep(crossed)).squeeze(1)
        return self.head(torch.cat([crossed, self.deep(x0)], dim=1)).squeeze(1)
