"""Wide & Deep: a linear model that memorises beside an MLP that generalises (Cheng et al., arXiv 1606.07792).

    ids              -> rows -> vectors v [B, F, d] and first-order weights w [B, F]
    wide             sum of w                                                    a weight an id
    deep             dense beside all v -> MLP -> one linear                     generalises over ids
    logit            wide + deep

The wide part is a sum of 26 numbers a sample: nothing to compute, but in a table of its own it would move as many rows as
the vectors do. Here a weight is the last number of its row (base.py). The paper trains the wide part by FTRL and the deep
part by Adagrad; a record has one optimizer, so both train by that of the rows. Crossed columns, which the paper's wide part
lives on, are for the data to make: an id column of pairs is a feature like any other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import Batch
from skirl.models.base import Embeddings, FirstOrder, last, linear, mlp


class WideDeep(FirstOrder):
    """The model of the paper over any embeddings module; `forward` gives logits.

    >>> from types import SimpleNamespace
    >>> from skirl.core.tables import Table
    >>> class Zeros:
    ...     tables = [Table("user", rows=100, dim=8 + 1), Table("item", rows=50, dim=8 + 1)]
    ...     def __call__(self, sparse):
    ...         return SimpleNamespace(stacked=lambda: torch.zeros(5, 2, 8 + 1))
    >>> model = WideDeep(Zeros(), dense_features=4, deep=(16,))
    >>> model(Batch(dense=torch.zeros(5, 4), sparse=None, labels=torch.zeros(5))).shape
    torch.Size([5])
    """

    name = "Wide & Deep"

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        deep: Sequence[int] = (256, 256, 256),
        rows_in_deep: bool = True,
    ) -> None:
        """`deep`: the hidden layers. rows_in_deep=False: they take the dense features alone, and the one linear layer
        takes the rows' vectors beside what they give."""
        super().__init__()
        dim, features = self._over(embeddings, dense_features, "joins vectors of one dim")
        self.rows_in_deep = rows_in_deep
        before, behind = (features * dim, 0) if rows_in_deep else (0, features * dim)
        self.deep = mlp(dense_features + before, *deep)
        self.head = linear(last(deep, dense_features + before) + behind, 1)

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "WideDeep":
        """Three hidden layers of 256, as the cache papers have them, over dense features and rows, as the paper has it."""
        return cls(embeddings, dense_features, **sizes)

    @classmethod
    def bagpipe(cls, embeddings: Embeddings, dense_features: int = 13) -> "WideDeep":
        """As the cache papers train it: 13-256-256-256 over the dense features alone, and one linear; to compare times."""
        return cls(embeddings, dense_features, rows_in_deep=False)

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> "WideDeep":
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        return cls(embeddings, dense_features, **dict[str, Any](deep=(32, 16)) | sizes)

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        vectors, weights = self._rows(batch)
        dense, vectors = self._dense(batch), vectors.flatten(1)
        if self.rows_in_deep:
            deep = self.deep(torch.cat([dense, vectors], dim=1))
        else:
            deep = torch.cat([self.deep(dense), vectors], dim=1)
        return weights.sum(dim=1) + self.head(deep).squeeze(1)
