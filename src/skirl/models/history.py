"""Histories of a user: sums, and samples that share one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Batch, Sparse, moved
from skirl.core.once import Distinct
from skirl.core.tables import Table
from skirl.models.base import Embeddings, Model

TILE = 16
"""Number of ids of a bag that are beside each other in registers."""


class SamplesByBag(NamedTuple):
    """The samples of each bag, and where the ids of each bag begin and end (int64 [bags])."""

    begins: np.ndarray
    ends: np.ndarray
    first: np.ndarray
    """int64 [bags + 1]: where the samples of each bag begin in `order`."""
    order: np.ndarray
    """int64 [batch]: the samples, by bag, those of a bag ascending."""
    wide: int
    """Ids of the longest bag, rounded up to whole tiles."""

    @classmethod
    def of(cls, bags: Distinct) -> "SamplesByBag":
        offsets, inverse = bags.offsets.numpy(), bags.inverse.numpy()
        begins, ends = offsets[:-1], offsets[1:]
        first = np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=bags.bags))])
        longest = int((ends - begins).max(initial=0))
        return cls(begins, ends, first, np.argsort(inverse, kind="stable"), -(-longest // TILE) * TILE)


def owners(lengths: Tensor, at: torch.device) -> Tensor:
    """Return the sample (or bag) of each id, on device `at`; lengths may be on the host."""
    return moved(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), at)


def sums(rows: Tensor, sample: Tensor, samples: int) -> Tensor:
    """Sum rows by sample, in the order of the ids."""
    return rows.new_zeros(samples, rows.shape[1]).index_add(0, sample, rows)


class OfHistory(Model):
    """A model whose target (the item shown) attends to a history (past actions): DIN and DCAT say which features are which.

    If samples share bags, what depends on a bag alone is computed once per bag.
    """

    def __init__(self, embeddings: Embeddings, dense_features: int = 13, lists: Sequence[str] = ()) -> None:
        super().__init__(embeddings, dense_features)
        self.features = [name for table in embeddings.tables for name in table.features]
        self.lists = frozenset(lists)
        self.means = {name for table in embeddings.tables if table.pooling == "mean" for name in table.features}
        self.history = self.pairs(embeddings.tables, lists)
        self.attended = len(self.history) or 1  # number of histories
        if getattr(embeddings, "pooled", not self.history) == bool(self.history):
            wrong = "has no list whose table a single feature shares: set embeddings to an EmbeddingBagCollection"
            if self.history:
                wrong = f"attends to the lists {', '.join(self.history)} id by id: set embeddings to an "
                wrong += "EmbeddingCollection, which does not pool"
            raise ValueError(f"{self.name} {wrong}")
        # Without lists, the feature that says most about the item shown attends to the others.
        self.target = self.features.index(max(embeddings.tables, key=lambda table: table.rows).features[0])

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

    deep: nn.Module
    head: nn.Module

    def attend(self, number: int, lists: Distinct, target: Tensor) -> Tensor:
        """Return what the targets, [batch, dim], see in history `number`: [batch, width]."""
        raise NotImplementedError

    def attend_to_features(self, others: Tensor, target: Tensor) -> Tensor:
        """Do the same with the other features of each sample, [batch, features, dim], as the history."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        dense = self._dense(batch)
        if self.history:
            by_name, lists = self._of_lists(batch.sparse)
            vectors = torch.stack(list(by_name.values()), dim=1)
            pairs = enumerate(self.history.items())
            seen = [self.attend(number, lists[name], by_name[target]) for number, (name, target) in pairs]
        else:
            vectors, target, others = self._of_features(batch.sparse)
            seen = [self.attend_to_features(others, target.squeeze(1))]
        return self.head(self.deep(torch.cat([dense, vectors.flatten(1), *seen], dim=1))).squeeze(1)

    def _of_features(self, sparse: Sparse) -> tuple[Tensor, Tensor, Tensor]:
        """Return all vectors [B, F, dim], the target's [B, 1, dim] and those of the other features [B, F - 1, dim]."""
        vectors: Tensor = self.embeddings(sparse).stacked()
        before, target, behind = vectors.tensor_split([self.target, self.target + 1], dim=1)
        return vectors, target, torch.cat([before, behind], dim=1)

    def _of_lists(self, sparse: Sparse) -> tuple[dict[str, Tensor], dict[str, Distinct]]:
        """Return a vector per sample, [B, dim], of each feature that is not a history, and the lists of each history."""
        if sparse.weights_or_none() is not None:
            raise ValueError(f"{self.name} weighs the ids of a list itself: pass a batch without weights")
        rows = self.embeddings(sparse)
        bags = {name: rows.distinct(name) for name in self.features}
        vectors = {name: self._pooled(name, of) for name, of in bags.items() if name not in self.history}
        return vectors, {name: bags[name] for name in self.history}

    def _pooled(self, name: str, bags: Distinct) -> Tensor:
        lengths = bags.offsets.diff()
        if name not in self.lists:
            if not bool((lengths == 1).all()):
                raise ValueError(
                    f"{self.name}: feature {name!r} has {len(bags.rows)} ids for {bags.bags} samples and is not among the "
                    "lists: give it one for each sample, or add it to lists"
                )
            return bags.for_samples(bags.rows)
        pooled = sums(bags.rows, owners(lengths, bags.rows.device), bags.bags)
        if name in self.means:
            pooled = pooled / moved(lengths.clamp(min=1)[:, None], pooled.device)
        return bags.for_samples(pooled)
