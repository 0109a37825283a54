"""DLRM: dense features and id features interact in dot products (Naumov et al., arXiv 1906.00091)."""

from collections.abc import Sequence
from typing import ClassVar

import torch

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, Model, mlp
from skirl.models.pairs import pairs, places


class DLRM(Model):
    """DLRM over any embeddings module; `forward` returns logits. The defaults are the sizes of the cache papers.

        dense [B, k]  -> bottom MLP -> x [B, D]
        ids           -> embeddings -> e [B, F, D]
        all pairs of {x, e_1 .. e_F} -> dot products [B, F (F + 1) / 2]
        [x, dot products] -> top MLP -> logit [B]

    **Arguments** beside those of `Model`

    - `bottom`: hidden layers for the dense features, by default as in the cache papers; one of the tables' dim follows them.
    - `top`: hidden layers after the dot products, by default as in these papers; one of width 1, the logit, follows them.

    >>> import skirl
    >>> tables = [skirl.Table("user", rows=100, dim=8), skirl.Table("item", rows=50, dim=8)]
    >>> rows = skirl.EmbeddingBagCollection(tables, optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> model = DLRM(rows, dense_features=4, bottom=(16,), top=(16,))
    >>> ids = skirl.KeyedJagged.one_hot(["user", "item"], torch.tensor([[1, 2], [3, 4]]))
    >>> model(skirl.Batch(dense=torch.zeros(2, 4), sparse=ids, labels=torch.zeros(2))).shape
    torch.Size([2])
    """

    name = "DLRM"
    small: ClassVar = {"bottom": (32,), "top": (64, 32)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (1024, 1024, 1024, 256, 128),
    ) -> None:
        super().__init__(embeddings, dense_features)
        vectors = 1 + self.vectors
        self.bottom = mlp(dense_features, *bottom, self.dim)
        self.top = mlp(self.dim + vectors * (vectors - 1) // 2, *top, 1)[:-1]  # no ReLU after the logit
        self.places: torch.Tensor
        self.register_buffer("places", places(vectors), persistent=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.bottom(self._dense(batch))
        return self.top(pairs(x, self.embeddings(batch.sparse).stacked(), self.places)).squeeze(1)
