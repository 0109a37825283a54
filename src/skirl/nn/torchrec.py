"""Swaps TorchRec's EmbeddingBagCollection inside a model for skirl's; neither the rows nor the model's code change.
TorchRec is recognized by the names of its methods and never imported, so any of its releases will do.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from skirl.core.batch import KeyedJagged, Sparse
from skirl.core.groups import RowOptimizers
from skirl.core.tables import Table
from skirl.engine.access import put_weight
from skirl.engine.capacity import CacheSize
from skirl.nn.collection import EmbeddingBagCollection
from skirl.store import Store

_DTYPES = {"FP32": torch.float32, "FP64": torch.float64}


class Swapped(nn.Module):
    """The module that replaces a TorchRec EmbeddingBagCollection; made by `swap`."""

    def __init__(self, theirs: Any, *, weights: bool = True, **options: Any) -> None:
        super().__init__()
        configs = theirs.embedding_bag_configs()
        self.features = [name for config in configs for name in config.feature_names]
        if len(set(self.features)) < len(self.features):
            raise ValueError("a feature looks up rows in two tables: rename it in one of them before the swap")
        kinds = {config.data_type.name for config in configs}
        if len(kinds) != 1 or not kinds <= _DTYPES.keys():
            raise ValueError(f"rows are of {', '.join(sorted(kinds))}: make all tables FP32, or all FP64")
        tables = [
            Table(
                config.name, config.num_embeddings, config.embedding_dim, tuple(config.feature_names),
                pooling="mean" if config.pooling.name == "MEAN" else "sum",
            )
            for config in configs
        ]  # fmt: skip
        self._weighted = bool(theirs.is_weighted())
        self._output = getattr(sys.modules[type(theirs).__module__], "KeyedTensor", None)
        self._dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.rows = EmbeddingBagCollection(tables, dtype=_DTYPES[kinds.pop()], **options)
        state = theirs.state_dict()
        if weights and not any(tensor.is_meta for tensor in state.values()):
            for number, table in enumerate(tables):
                put_weight(self.rows.engine, number, state[f"embedding_bags.{table.name}.weight"])

    def sparse(self, features: Sparse) -> Sparse:
        """Return the ids of a batch, for a lookahead. An unweighted collection drops weights, as TorchRec's does."""
        if self._weighted or features.weights_or_none() is None:
            return features
        return KeyedJagged.of(features).unweighted()

    def forward(self, features: Sparse) -> Any:
        """Look up a batch and return a KeyedTensor, with its features in TorchRec's order."""
        out = self.rows(self.sparse(features))
        values = torch.cat([out[name] for name in self.features], dim=1)
        if self._output is None:
            return Keyed(self.features, self._dims, values)
        return self._output(keys=self.features, length_per_key=self._dims, values=values)


class Keyed:
    """The methods of a KeyedTensor that models call, for use if TorchRec's own class cannot be found."""

    def __init__(self, keys: list[str], lengths: list[int], values: Tensor) -> None:
        self._keys, self._lengths, self._values = keys, lengths, values

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the outputs of all features side by side, [batch, sum of dims]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the dim of each feature."""
        return self._lengths

    def to_dict(self) -> dict[str, Tensor]:
        """Return the output of each feature by name."""
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]


def swap(
    model: nn.Module,
    *,
    optimizer: RowOptimizers,
    cache: CacheSize,
    store: str | Store = "memory",
    seed: int = 0,
    resume: bool = False,
) -> nn.Module:
    """Replace the one EmbeddingBagCollection of a TorchRec model, in place, and return the model.

    Rows are copied as they are; a collection on the meta device has none, and starts from skirl's initial values. The
    old collection's parameters are gone, so make dense optimizers afterwards.

    **Arguments**

    - `model`: the model; if it is itself the collection, the new module is returned.
    - `optimizer`: how backward updates rows: one for all tables, or one for each pattern of their names; required, as
      TorchRec's own collections also leave it to the caller.
    - `cache`: how much of the device the rows may take: rows, a share ("10%") or bytes ("4GiB"). No default suits every
      model.
    - `store`: where the other rows are: "memory", which needs no setup, "disk:FOLDER" or a `skirl.store.Store`.
    - `seed`: fixes the initial values of rows that are not copied, 0 so that runs repeat.
    - `resume`: use the rows that the store already holds, instead of the collection's; False refuses a store that is
      not empty.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_theirs(module)]
    if len(found) != 1:
        raise ValueError(f"the model has {len(found)} EmbeddingBagCollections of TorchRec, and has to have exactly one")
    [(name, theirs)] = found
    options = {"optimizer": optimizer, "cache": cache, "store": store, "seed": seed, "resume": resume}
    ours = Swapped(theirs, weights=not resume, **options)
    if not name:
        return ours
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, ours)
    return model


def _is_theirs(module: nn.Module) -> bool:
    return hasattr(module, "embedding_bag_configs") and hasattr(module, "is_weighted")
