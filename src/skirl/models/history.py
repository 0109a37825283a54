"""The base of models in which a target attends to a history: finds which feature is which, and takes each list once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import KeyedJagged, Sparse, moved
from skirl.core.once import Distinct
from skirl.core.tables import Table
from skirl.models.base import Embeddings, Model
from skirl.models.sums import list_sums


class OfHistory(Model):
    """A model whose target (the item shown) attends to a history (past actions).

    A list is the history of the single feature that has the same table, such as `table = "item"` for both `item` and
    `clicked` in a schema. Lists without a target are pooled here, as their table says. Without such a pair, as in
    Criteo and Avazu, one feature is the target and the others are its history.

    If samples share bags, what depends on a bag alone is computed once per bag.
    """

    def __init__(
        self, embeddings: Embeddings, dense_features: int = 13, lists: Sequence[str] = (), target: str | None = None
    ) -> None:
        super().__init__(embeddings, dense_features)
        self.features = [name for table in embeddings.tables for name in table.features]
        self.lists = frozenset(lists)
        self.means = {name for table in embeddings.tables if table.pooling == "mean" for name in table.features}
        self.history = self.pairs(embeddings.tables, lists)
        if getattr(embeddings, "pooled", not self.history) == bool(self.history):
            raise ValueError(
                f"{self.name} attends to the lists {', '.join(self.history)} id by id: set embeddings to an "
                "EmbeddingCollection, which does not pool"
                if self.history
                else f"{self.name} has no list whose table a single feature shares: set embeddings to an "
                "EmbeddingBagCollection"
            )
        attends = self.target_of(embeddings.tables, lists, target)
        if attends is not None:
            self.target = self.features.index(attends)

    @staticmethod
    def pairs(tables: Sequence[Table], lists: Sequence[str]) -> dict[str, str]:
        """Return each list that is a history, with its target: the first single feature of the same table."""
        pairs = {}
        for table in tables:
            single = [name for name in table.features if name not in lists]
            pairs |= {name: single[0] for name in table.features if name in lists and single}
        return pairs

    @classmethod
    def pools(cls, tables: Sequence[Table], lists: Sequence[str]) -> bool:
        """Return True only if the data has no list to attend to."""
        return not cls.pairs(tables, lists)

    @classmethod
    def target_of(cls, tables: Sequence[Table], lists: Sequence[str], wanted: str | None) -> str | None:
        """Return the one feature that attends to the others, or None if lists have targets of their own."""
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
            raise ValueError(f"{cls.name} has no feature {wanted!r}: set target to one of {', '.join(features)}")
        return wanted

    @property
    def attended(self) -> int:
        """Number of histories."""
        return len(self.history) or 1

    def _of_features(self, sparse: Sparse) -> tuple[Tensor, Tensor, Tensor]:
        """Return all vectors [B, F, dim], the target's [B, 1, dim] and those of the other features [B, F - 1, dim]."""
        vectors: Tensor = self.embeddings(sparse).stacked()
        before, target, behind = vectors.tensor_split([self.target, self.target + 1], dim=1)
        return vectors, target, torch.cat([before, behind], dim=1)

    def _of_lists(self, sparse: Sparse) -> tuple[dict[str, Tensor], dict[str, Distinct]]:
        """Return a vector per sample, [B, dim], of each feature that is not a history, and the lists of each history."""
        if sparse.weights_or_none() is not None:
            raise ValueError(f"{self.name} weighs the ids of a list itself: pass a batch without weights")
        rows, lengths = self.embeddings(sparse), KeyedJagged.of(sparse).lengths_by_sample()
        bags = {name: _once(rows, name, lengths[name]) for name in self.features}
        vectors = {name: self._pooled(name, of) for name, of in bags.items() if name not in self.history}
        return vectors, {name: bags[name] for name in self.history}

    def _pooled(self, name: str, bags: Distinct) -> Tensor:
        """Return one vector per sample for a feature."""
        lengths = bags.offsets.diff()
        if name not in self.lists:
            if not bool((lengths == 1).all()):
                raise ValueError(
                    f"{self.name}: feature {name!r} has {len(bags.rows)} ids for {bags.bags} samples and is not among the "
                    "lists: give it one for each sample, or add it to lists"
                )
            return bags.for_samples(bags.rows)
        pooled = list_sums(bags)
        if name in self.means:
            pooled = pooled / moved(lengths.clamp(min=1)[:, None], pooled.device)
        return bags.for_samples(pooled)


def _once(rows: Any, name: str, lengths: Tensor) -> Distinct:
    """Return the distinct lists of a feature, or a list for each sample if the embeddings do not say which are shared."""
    if hasattr(rows, "distinct"):
        return rows.distinct(name)
    ends = lengths.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return Distinct(rows[name], offsets, torch.arange(len(ends), device=ends.device))
