"""The base of all models: what they require of embeddings, layers with their initial values, the loss, and whether loops
of our own fit."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

import torch
from numba import config
from torch import Tensor, nn
from torch.nn import functional

from skirl.core.batch import Batch, moved
from skirl.core.tables import Table


class Embeddings(Protocol):
    """The interface of a model's embeddings: skirl's modules, wrapped `nn.EmbeddingBag`s, or the plain reference."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables that ids are looked up in. A model takes the dim of vectors and the features from them."""
        ...

    def __call__(self, sparse: Any, /) -> Any:
        """Look up a batch's ids. The result has `stacked()`, a vector per sample and feature: [batch, features, dim].

        DIN and DCAT with lists ask the result for `distinct(feature)` instead, each bag once.
        """
        ...


class Model(nn.Module):
    """A model of clicks over embeddings: `forward` returns the logit of each sample.

    Parameters are drawn from torch's generator: to repeat a model, call `torch.manual_seed` first.

    **Arguments**

    - `embeddings`: looks up ids; all its tables have one dim.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has. 0 is allowed.
    """

    name: ClassVar[str]  # in errors
    small: ClassVar[Mapping[str, Any]]  # the sizes of `tiny`
    embeddings: Embeddings
    dense_features: int

    def __init__(self, embeddings: Embeddings, dense_features: int = 13) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense_features = dense_features
        if len(dims := {table.dim for table in embeddings.tables}) != 1:
            raise ValueError(
                f"{self.name} takes vectors of one dim, tables have dims {sorted(dims)}: set one dim for all tables"
            )
        self.dim = dims.pop()
        self.vectors = sum(len(table.features) for table in embeddings.tables)  # of a sample, one for each feature

    @classmethod
    def row_dim(cls, dim: int) -> int:
        """Return the dim that the model's tables need for vectors of length `dim`."""
        return dim

    @classmethod
    def pools(cls, tables: Sequence[Table], lists: Sequence[str]) -> bool:
        """Return whether the model takes one vector per sample and feature, rather than one per id. lists: the features with
        any number of ids per sample."""
        return True

    @classmethod
    def tiny(cls, embeddings: Embeddings, dense_features: int = 13, **sizes: Any) -> Self:
        """Make a model so small that a step of 1,024 samples takes milliseconds on one core. sizes: what should differ from
        `small`."""
        return cls(embeddings, dense_features, **{**cls.small, **sizes})

    def forward(self, batch: Batch) -> Tensor:
        """Return the logit of each sample's click, [batch]."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean binary cross-entropy of a batch, which has a label for each sample."""
        logits = self(batch)
        if batch.labels.shape != logits.shape:
            raise ValueError(
                f"{self.name} predicts one number a sample, and labels have shape {list(batch.labels.shape)}: pass labels "
                f"of shape {list(logits.shape)}, one label a sample"
            )
        return functional.binary_cross_entropy_with_logits(logits, moved(batch.labels, logits.device, logits.dtype))

    def _dense(self, batch: Batch) -> Tensor:
        columns = batch.dense.shape[1]
        if columns != self.dense_features:
            raise ValueError(
                f"{self.name} was made for {self.dense_features} dense features, the batch has {columns}: "
                f"set dense_features={columns}"
            )
        # Device and dtype of the last layers: embeddings come first, and may have no parameters, or some elsewhere.
        weights = next(weights for layers in reversed([*self.children()]) for weights in layers.parameters())
        return moved(batch.dense, weights.device, weights.dtype)


class FirstOrder(Model):
    """A model whose rows end with a first-order weight: tables of dim d + 1 hold vectors of d numbers."""

    def __init__(self, embeddings: Embeddings, dense_features: int = 13) -> None:
        super().__init__(embeddings, dense_features)
        if self.dim < 2:
            raise ValueError(
                f"{self.name} takes the last number of a row as its first-order weight, tables have dim 1: set dim to 2 "
                "or more, one above that of the vectors"
            )
        self.dim -= 1

    @classmethod
    def row_dim(cls, dim: int) -> int:
        return dim + 1

    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Look up vectors [B, F, d] and first-order weights [B, F]."""
        rows: Tensor = self.embeddings(batch.sparse).stacked()
        vectors, weights = rows.split([self.dim, 1], dim=2)  # two slices would make two full-size gradients
        return vectors, weights.squeeze(2)


def linear(n: int, m: int, bias: bool = True) -> nn.Linear:
    with warnings.catch_warnings():
        if not n:  # no dense features: the layer is only a bias, and torch warns that there are no weights to draw
            warnings.simplefilter("ignore")
        layer = nn.Linear(n, m, bias=bias)
        nn.init.normal_(layer.weight, std=(2 / (m + n)) ** 0.5)
    if bias:
        nn.init.normal_(layer.bias, std=(1 / m) ** 0.5)
    return layer


def mlp(*sizes: int, dropout: float = 0.0, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = nn.Sequential()
    for n, m in pairwise(sizes):
        layers.append(linear(n, m)).append(activation())
        if dropout:
            layers.append(nn.Dropout(dropout))
    return layers


def last(sizes: Sequence[int], otherwise: int) -> int:
    """Return the width of the last layer, or that of the input if there are no layers."""
    return sizes[-1] if sizes else otherwise


def fit(*tensors: Tensor, captured: bool = False) -> bool:
    """Return whether our loops can take these tensors: on a CPU, of one dtype, and while no graph is captured, unless the
    loops are an operator of that graph."""
    dtype = tensors[0].dtype
    return (
        all(
            (captured or type(each) is Tensor) and each.device.type == "cpu" and each.dtype == dtype for each in tensors
        )
        and dtype in (torch.float32, torch.float64)
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"))
        and not config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]
    )
