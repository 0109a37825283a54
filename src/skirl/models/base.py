"""What the models share: what they ask of embeddings, layers with their initial values, and the loss.

A model is a plain nn.Module over any embeddings: skirl's own, `nn.EmbeddingBag`s in a wrapper, the reference in plain
Python. It is told the number of dense features and reads the rest off the tables. One class with a flag for each part of
each paper would save a hundred lines of layers, and no file would read like its paper any more.

First-order weights are rows too (`FirstOrder`): the table's dim is one larger, and the last number of a row is its weight.
So weight and vector are one record, fetched, updated and written together; tables of dim 1 beside them would double the
rows that move, 2 x 26 a sample, each with its own key and optimizer state. The price is an odd width: forward and backward
of 4,096 x 26 rows take 3.5 ms at 48 floats a row and 9.4 ms at 49, on one core, for kernels are compiled for multiples of
16. So prefer --dim 47 to 48 with these models, and 15 to 16.
"""

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor, nn
from torch.nn import functional

from skirl.core.batch import Batch, moved
from skirl.core.tables import Table


class Embeddings(Protocol):
    """What a model needs of an embeddings module: its tables, and ids -> something whose `stacked()` is [B, F, D]."""

    @property
    def tables(self) -> Sequence[Table]: ...
    def __call__(self, sparse: Any, /) -> Any: ...


class Model(nn.Module):
    """A model of clicks over embeddings: `forward` gives the logit of each sample.

    Parameters are drawn from torch's generator: call `torch.manual_seed` first for the same model again.
    """

    name: ClassVar[str]
    """As errors call it."""
    embeddings: Embeddings
    dense_features: int

    @classmethod
    def row_dim(cls, dim: int) -> int:
        """The dim of the tables for vectors of `dim` numbers."""
        return dim

    @classmethod
    def paper(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> Self:
        """The sizes that are trained in earnest; but for `sizes`, by the names that the class gives them."""
        raise NotImplementedError

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> Self:
        """Small enough that a step of 1,024 samples takes milliseconds on one core, for tests and first tries."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy of a batch."""
        logits = self(batch)
        if batch.labels.shape != logits.shape:
            raise ValueError(
                f"{self.name} predicts one number a sample, labels are {list(batch.labels.shape)}: pass a batch with labels "
                f"of {list(logits.shape)}, one of the columns say"
            )
        return functional.binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype))

    def _over(self, embeddings: Embeddings, dense_features: int, why: str) -> tuple[int, int]:
        """Keep what the model is over; the one dim of the tables, and how many features they have."""
        self.embeddings = embeddings
        self.dense_features = dense_features
        tables = embeddings.tables
        if len(dims := {table.dim for table in tables}) != 1:
            raise ValueError(f"{self.name} {why}, tables have dims {sorted(dims)}: set one dim for all tables")
        return dims.pop(), sum(len(table.features) for table in tables)

    def _dense(self, batch: Batch) -> Tensor:
        """The dense features where the model is, in its dtype."""
        found = batch.dense.shape[1]
        if found != self.dense_features:
            raise ValueError(
                f"{self.name} was made for {self.dense_features} dense features, the batch has {found}: "
                f"set dense_features={found}"
            )
        *_, own = self.parameters()  # the last: those of embeddings, if they have any, come first
        return moved(batch.dense, own.device, own.dtype)


class FirstOrder(Model):
    """A model whose rows end with their first-order weight: tables of dim d + 1 hold vectors of d numbers.

    The weight begins as the rest of its row does: even in +-1 / sqrt(rows), at most 0.001 in a table of a million rows. 0
    would be the choice of the papers; but the initial value of a row is a pure function of seed and key with one
    distribution a table, and the rows whose weight begins far from 0, those of tables of ten rows, are in every batch and
    trained before anything else. With row-wise Adagrad, weight and vector share one step size.
    """

    @classmethod
    def row_dim(cls, dim: int) -> int:
        """One more than the vectors: the first-order weight."""
        return dim + 1

    def _over(self, embeddings: Embeddings, dense_features: int, why: str) -> tuple[int, int]:
        width, features = super()._over(embeddings, dense_features, why)
        if width < 2:
            raise ValueError(
                f"{self.name} takes the last number of a row as its first-order weight, tables have dim 1: set dim to 2 "
                "or more, one above that of the vectors"
            )
        return width - 1, features

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Vectors [B, F, d] and first-order weights [B, F]."""
        rows: Tensor = self.embeddings(batch.sparse).stacked()
        vectors, weights = rows.split([rows.shape[2] - 1, 1], dim=2)  # two slices would be two gradients of full size
        return vectors, weights.squeeze(2)


def linear(n: int, m: int, bias: bool = True) -> nn.Linear:
    """A linear layer with the initial values of DLRM's authors."""
    with warnings.catch_warnings():
        if not n:  # no dense features: the layer is its bias, and torch warns that there are no weights to draw
            warnings.simplefilter("ignore")
        layer = nn.Linear(n, m, bias=bias)
        nn.init.normal_(layer.weight, std=(2 / (m + n)) ** 0.5)
    if bias:
        nn.init.normal_(layer.bias, std=(1 / m) ** 0.5)
    return layer


def mlp(*sizes: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear and ReLU for each pair of sizes, and dropout behind each if there is any.

    >>> mlp(4, 8, 2)
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
      (3): ReLU()
    )
    """
    layers = nn.Sequential()
    for n, m in pairwise(sizes):
        layers.append(linear(n, m)).append(nn.ReLU())
        if dropout:
            layers.append(nn.Dropout(dropout))
    return layers


def last(sizes: Sequence[int], otherwise: int) -> int:
    """The width that layers end with; that of their input where there are none."""
    return sizes[-1] if sizes else otherwise
