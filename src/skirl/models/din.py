"""Deep Interest Network: what a user did counts by how near it is to what is shown (Zhou et al., arXiv 1706.06978)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn

from skirl.core.batch import Batch, KeyedJagged, Sparse, moved
from skirl.core.tables import Table
from skirl.models.base import Embeddings, Model, last, linear


class DIN(Model):
    """DIN over any embeddings module; `forward` gives logits. The defaults are the paper's sizes.

        target t         the row of what is shown                       behaviour h_1 .. h_n: rows of what was done before
        activation a_i   A h_i + B t + C (h_i * t) + b -> PReLU -> a number
        interest         sum of a_i h_i, not normalised: many near ones count for more than one
        logit            dense beside all vectors beside the interests -> MLP with PReLU -> linear

    A list is the behaviour of the single feature that has the same table, such as `table = "item"` for both `item` and
    `clicked` in a schema. Each list has an activation unit of its own; lists without a target are pooled here, as their
    table says. Without such a pair, as in Criteo and Avazu, one feature is the target and the others are the behaviour.

    **Arguments**

    - `embeddings`: looks ids up; an `EmbeddingCollection`, which does not pool, where a list shares its table with a single
      feature, and an `EmbeddingBagCollection` elsewhere.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `lists`: the features with any number of ids a sample.
    - `target`: without such a list, the feature that attends to the others; None: that of most rows, which says most about
      what is shown.
    - `activation`: width of the activation unit.
    - `deep`: hidden layers.

    >>> import skirl
    >>> tables = [Table("item", rows=50, dim=8, features=("item", "clicked")), Table("user", rows=100, dim=8)]
    >>> DIN.pairs(tables, lists=["clicked"])
    {'clicked': 'item'}
    >>> rows = skirl.EmbeddingCollection(tables, optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> model = DIN(rows, dense_features=4, lists=["clicked"])
    >>> ids = skirl.KeyedJagged(["item", "clicked", "user"], torch.arange(8), lengths=torch.tensor([1, 1, 0, 4, 1, 1]))
    >>> model(Batch(dense=torch.zeros(2, 4), sparse=ids, labels=torch.zeros(2))).shape
    torch.Size([2])
    """

    name = "DIN"
    small: ClassVar = {"activation": 8, "deep": (32, 16)}

    def __init__(
        self,
        embeddings: Embeddings,
        dense_features: int = 13,
        lists: Sequence[str] = (),
        target: str | None = None,
        activation: int = 36,
        deep: Sequence[int] = (200, 80),
    ) -> None:
        super().__init__(embeddings, dense_features)
        self.features = [name for table in embeddings.tables for name in table.features]
        self.lists = frozenset(lists)
        self.means = {name for table in embeddings.tables if table.pooling == "mean" for name in table.features}
        self.history = self.pairs(embeddings.tables, lists)
        if getattr(embeddings, "pooled", not self.history) == bool(self.history):
            raise ValueError(
                f"DIN attends to the lists {', '.join(self.history)} id by id: set embeddings to an EmbeddingCollection, "
                "which does not pool"
                if self.history
                else "DIN has no list whose table a single feature shares: set embeddings to an EmbeddingBagCollection"
            )
        attends = self.target_of(embeddings.tables, lists, target)
        if attends is not None:
            self.target = self.features.index(attends)
        self.units = nn.ModuleList(ActivationUnit(self.dim, activation) for _ in self.history or [None])
        width = dense_features + (self.vectors - len(self.history) + len(self.units)) * self.dim
        self.deep = prelu_mlp(width, *deep)
        self.head = linear(last(deep, width), 1)

    @staticmethod
    def pairs(tables: Sequence[Table], lists: Sequence[str]) -> dict[str, str]:
        """Each list that is a behaviour, and the feature that is its target: the first single one of its table."""
        pairs = {}
        for table in tables:
            single = [name for name in table.features if name not in lists]
            pairs |= {name: single[0] for name in table.features if name in lists and single}
        return pairs

    @classmethod
    def target_of(cls, tables: Sequence[Table], lists: Sequence[str], wanted: str | None) -> str | None:
        """The one feature that attends to the others; None where each list has a target of its own."""
        if pairs := cls.pairs(tables, lists):
            if wanted is not None:
                by_table = ", ".join(f"{name} has {target}" for name, target in pairs.items())
                raise ValueError(
                    f"target is {wanted!r}, and lists have theirs by their table ({by_table}): leave target out"
                )
            return None
        features = [name for table in tables for name in table.features]
        if wanted is None:
            return max(tables, key=lambda table: table.rows).features[0]
        if wanted not in features:
            raise ValueError(f"DIN has no feature {wanted!r}: set target to one of {', '.join(features)}")
        return wanted

    def forward(self, batch: Batch) -> Tensor:
        """The logit of each sample's click, [batch]."""
        dense = self._dense(batch)
        vectors, interests = self._behaviour(batch.sparse) if self.history else self._features(batch.sparse)
        seen = torch.cat([vectors.flatten(1), *interests], dim=1)
        return self.head(self.deep(torch.cat([dense, seen], dim=1))).squeeze(1)

    def _features(self, sparse: Sparse) -> tuple[Tensor, list[Tensor]]:
        """Attention of one feature over the others."""
        vectors: Tensor = self.embeddings(sparse).stacked()
        before, target, behind = vectors.tensor_split([self.target, self.target + 1], dim=1)
        others = torch.cat([before, behind], dim=1)
        weights = self.units[0](others, target)
        return vectors, [(weights * others).sum(dim=1)]

    def _behaviour(self, sparse: Sparse) -> tuple[Tensor, list[Tensor]]:
        """Attention of targets over the lists that share their tables."""
        if sparse.weights_or_none() is not None:
            raise ValueError("DIN weighs the ids of a list itself: pass a batch without weights")
        rows = self.embeddings(sparse)
        lengths = self._lengths(sparse)
        vectors = {
            name: self._pooled(name, rows[name], lengths[name]) for name in self.features if name not in self.history
        }
        interests = []
        for unit, (name, target) in zip(self.units, self.history.items()):
            h = rows[name]
            sample = _sample_of(lengths[name], h.device)
            t = vectors[target].index_select(0, sample)
            interests.append(_sums(unit(h, t) * h, sample, len(lengths[name])))
        return torch.stack(list(vectors.values()), dim=1), interests

    def _pooled(self, name: str, rows: Tensor, lengths: Tensor) -> Tensor:
        """A feature's one vector a sample."""
        if name not in self.lists:
            if not bool((lengths == 1).all()):
                raise ValueError(
                    f"DIN: feature {name!r} has {len(rows)} ids for {len(lengths)} samples and is not among the lists: "
                    "give it one for each sample, or add it to lists"
                )
            return rows
        sums = _sums(rows, _sample_of(lengths, rows.device), len(lengths))
        return sums / moved(lengths.clamp(min=1)[:, None], rows.device) if name in self.means else sums

    def _lengths(self, sparse: Sparse) -> dict[str, Tensor]:
        """How many ids each sample has, by feature."""
        return KeyedJagged.of(sparse).lengths_by_sample()


class ActivationUnit(nn.Module):
    """How much a behaviour counts for a target.

    >>> ActivationUnit(dim=4, width=8)(torch.ones(5, 3, 4), torch.ones(5, 1, 4)).shape
    torch.Size([5, 3, 1])
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.of_behaviour = linear(dim, width)
        self.of_target = linear(dim, width, bias=False)
        self.of_product = linear(dim, width, bias=False)
        self.rest = nn.Sequential(nn.PReLU(), linear(width, 1))

    def forward(self, h: Tensor, t: Tensor) -> Tensor:
        """[.., dim] and what broadcasts with it -> [.., 1]."""
        return self.rest(self.of_behaviour(h) + self.of_target(t) + self.of_product(h * t))


def prelu_mlp(*sizes: int) -> nn.Sequential:
    """Linear and PReLU for each pair of sizes."""
    layers = nn.Sequential()
    for n, m in pairwise(sizes):
        layers.append(linear(n, m)).append(nn.PReLU())
    return layers


def _sample_of(lengths: Tensor, at: torch.device) -> Tensor:
    """The sample of each id, on the device of its row; the lengths of a batch are usually on the host."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), at)


def _sums(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sums of rows by sample, in the order of the ids."""
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)
