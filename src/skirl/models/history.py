"""What models share that hold what is shown beside what was done before: which feature is which, each list once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skirl.core.batch import KeyedJagged, Sparse, moved
from skirl.core.once import Distinct
from skirl.core.tables import Table
from skirl.models.base import Embeddings, Model


class OfHistory(Model):
    """A model whose target, what is shown, attends to a history, what was done before.

    A list is the history of the single feature that has the same table, such as `table = "item"` for both `item` and
    `clicked` in a schema. Lists without a target are pooled here, as their table says. Without such a pair, as in Criteo and
    Avazu, one feature is the target and the others are its history.

    Where samples share bags, what depends on a bag alone is computed once for each bag.

    **Arguments**

    - `embeddings`: looks ids up; an `EmbeddingCollection`, which does not pool, where a list shares its table with a single
      feature, and an `EmbeddingBagCollection` elsewhere.
    - `dense_features`: columns of `Batch.dense`; 13 by default, as Criteo has.
    - `lists`: the features with any number of ids a sample.
    - `target`: without such a list, the feature that attends to the others; None: that of most rows, which says most about
      what is shown.
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
        """Each list that is a history, and the feature that is its target: the first single one of its table.

        **Arguments**

        - `tables`, `lists`: as for `pools`.
        """
        pairs = {}
        for table in tables:
            single = [name for name in table.features if name not in lists]
            pairs |= {name: single[0] for name in table.features if name in lists and single}
        return pairs

    @classmethod
    def pools(cls, tables: Sequence[Table], lists: Sequence[str]) -> bool:
        """Only where the data has no list to attend to."""
        return not cls.pairs(tables, lists)

    @classmethod
    def target_of(cls, tables: Sequence[Table], lists: Sequence[str], wanted: str | None) -> str | None:
        """The one feature that attends to the others; None where each list has a target of its own.

        **Arguments**

        - `tables`, `lists`: as for `pools`.
        - `wanted`: the feature that a flag or an argument names; None: that of the largest table.
        """
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
        """How many histories there are."""
        return len(self.history) or 1

    def _of_features(self, sparse: Sparse) -> tuple[Tensor, Tensor, Tensor]:
        """All vectors [B, F, dim]; the target [B, 1, dim] and the other features [B, F - 1, dim]."""
        vectors: Tensor = self.embeddings(sparse).stacked()
        before, target, behind = vectors.tensor_split([self.target, self.target + 1], dim=1)
        return vectors, target, torch.cat([before, behind], dim=1)

    def _of_lists(self, sparse: Sparse) -> tuple[dict[str, Tensor], dict[str, Distinct]]:
        """A vector for each sample of every feature that is no history, [B, dim], and each history."""
        if sparse.weights_or_none() is not None:
            raise ValueError(f"{self.name} weighs the ids of a list itself: pass a batch without weights")
        rows, lengths = self.embeddings(sparse), KeyedJagged.of(sparse).lengths_by_sample()
        bags = {name: _once(rows, name, lengths[name]) for name in self.features}
        vectors = {name: self._pooled(name, of) for name, of in bags.items() if name not in self.history}
        return vectors, {name: bags[name] for name in self.history}

    def _pooled(self, name: str, bags: Distinct) -> Tensor:
        """A feature's one vector a sample."""
        lengths = bags.offsets.diff()
        if name not in self.lists:
            if not bool((lengths == 1).all()):
                raise ValueError(
                    f"{self.name}: feature {name!r} has {len(bags.rows)} ids for {bags.bags} samples and is not among the "
                    "lists: give it one for each sample, or add it to lists"
                )
            return bags.for_samples(bags.rows)
        pooled = sums(bags.rows, owners(lengths, bags.rows.device), len(lengths))
        if name in self.means:
            pooled = pooled / moved(lengths.clamp(min=1)[:, None], pooled.device)
        return bags.for_samples(pooled)


def _once(rows: Any, name: str, lengths: Tensor) -> Distinct:
    """A feature with each bag once; a bag for each sample where embeddings do not say which are shared."""
    if hasattr(rows, "distinct"):
        return rows.distinct(name)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Distinct(rows[name], offsets, torch.arange(len(lengths), device=lengths.device))


def owners(lengths: Tensor, at: torch.device) -> Tensor:
    """The sample of each id, or the bag of each, on the device of its row; lengths may be on the host."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), at)


def sums(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sums of rows by sample, in the order of the ids."""
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)
