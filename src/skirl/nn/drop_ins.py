"""Drop-ins: `EmbeddingBag` for nn.EmbeddingBag, and `swap` for TorchRec's EmbeddingBagCollection inside a model.
TorchRec is recognized by the names of its methods and never imported, so any of its releases will do."""

import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skirl.core.batch import KeyedJagged, Sparse
from skirl.core.groups import RowOptimizers
from skirl.core.initial import Initial, Normal
from skirl.core.tables import Pooling, Table
from skirl.engine.access import put_weight
from skirl.engine.capacity import CacheSize
from skirl.nn.collection import EmbeddingBagCollection
from skirl.store import Store


class EmbeddingBag(nn.Module):
    """A drop-in for nn.EmbeddingBag: the same arguments, plus those for moving rows: an optimizer, a cache, a store.

    It works as it is, without a lookahead. With one, say which ids a batch has:
    `skirl.lookahead(loader, model, sparse=lambda batch: model.bag.sparse(batch.ids, batch.offsets))`.
    A model with several bags should use one `EmbeddingBagCollection` instead, so that they share a cache.

    **Arguments**

    - all up to `dtype`: as in torch. `max_norm`, `norm_type` and `scale_grad_by_freq` are refused unless left at torch's
      defaults, and so is the mode "max"; `sparse` has no effect. Rows of `_weight` are all stored.
    - `optimizer`: how backward updates rows.
    - `cache`: how much of the device the rows may take: rows, a share ("10%") or bytes ("4GiB").
    - `store`, `seed`, `resume`: as for `EmbeddingBagCollection`.
    - `init`: how rows are initialized, as for `skirl.Table`; None is `Normal(1.0)`, as in torch.

    >>> import skirl
    >>> bag = EmbeddingBag(1000, 4, mode="sum", optimizer=skirl.SGD(lr=0.1), cache=10)
    >>> bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        optimizer: RowOptimizers,
        cache: CacheSize,
        store: str | Store = "memory",
        seed: int = 0,
        init: Initial | Any = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        if max_norm is not None or norm_type != 2.0:
            raise ValueError(
                "max_norm is not supported, it changes rows where they are looked up: leave it out, or clip gradients by "
                "the optimizer's clip"
            )
        if scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq is not supported: leave it out, and use Adagrad for frequent ids")
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode is {mode!r}: set it to 'sum' or 'mean'")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}: set it to a row from 0 to {num_embeddings - 1}")
        if _weight is not None and tuple(_weight.shape) != (num_embeddings, embedding_dim):
            raise ValueError(f"_weight is {list(_weight.shape)}: pass [{num_embeddings}, {embedding_dim}]")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode: Pooling = "mean" if mode == "mean" else "sum"
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx + num_embeddings if padding_idx is not None and padding_idx < 0 else padding_idx
        table = Table(
            "weight", num_embeddings, embedding_dim, pooling=self.mode, init=Normal(1.0) if init is None else init
        )
        self.rows = EmbeddingBagCollection(
            [table], optimizer=optimizer, cache=cache, store=store, device=device or "cpu", seed=seed,
            dtype=dtype or torch.float32, resume=resume,
        )  # fmt: skip
        self.rows.names_tables = False
        if _weight is not None:
            put_weight(self.rows.engine, 0, _weight)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> "EmbeddingBag":
        """Start from these rows, which are not trained further unless `freeze` is False, as in torch."""
        rows, dim = embeddings.shape
        bag = cls(rows, dim, _weight=embeddings, **options)
        bag.requires_grad_(not freeze)
        return bag

    @property
    def optimizer(self) -> Any:
        """For torch's schedulers."""
        return self.rows.optimizer

    def sparse(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> KeyedJagged:
        """Return the ids of a batch in the form that a lookahead needs; arguments as for `forward`."""
        if per_sample_weights is not None and self.mode != "sum":
            raise ValueError(
                f"per_sample_weights need mode='sum', and mode is {self.mode!r}: set mode to 'sum', or leave the weights out"
            )
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ValueError(
                f"per_sample_weights are {list(per_sample_weights.shape)}, input is {list(input.shape)}: pass one for "
                "each id"
            )
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    f"offsets are for a one-dimensional input, and input is {list(input.shape)}: leave them out, each row "
                    "of input is a bag"
                )
            bags, each = input.shape
            ends = torch.arange(0, bags * each + 1, each) if each else torch.zeros(bags + 1, dtype=torch.int64)
        elif input.dim() == 1 and offsets is not None:
            ends = offsets.to(torch.int64)
            if not self.include_last_offset:
                ends = torch.cat([ends, ends.new_tensor([input.numel()])])
            if not ends.numel() or ends[0] != 0 or ends[-1] > input.numel() or (ends.diff() < 0).any():
                raise ValueError(
                    f"offsets have to ascend from 0 to at most {input.numel()}, the number of ids: pass where each "
                    "bag begins"
                )
        else:
            raise ValueError(f"input is {list(input.shape)}: pass [bags, ids], or one dimension and offsets")
        ids, weights = input.reshape(-1)[: ends[-1]], per_sample_weights
        weights = None if weights is None else weights.reshape(-1)[: ends[-1]]
        if self.padding_idx is not None:
            here = ids != self.padding_idx
            ends = torch.cat([ends.new_zeros(1), here.cumsum(0)])[ends]
            ids, weights = ids[here], None if weights is None else weights[here]
        return KeyedJagged(["weight"], ids, offsets=ends, weights=weights)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool, as torch's module does: `[bags, embedding_dim]`."""
        return self.rows(self.sparse(input, offsets, per_sample_weights))["weight"]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


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
        modules = [sys.modules[kind.__module__] for kind in type(theirs).__mro__]  # it may be a subclass of theirs
        self._output = next(module.KeyedTensor for module in modules if hasattr(module, "KeyedTensor"))
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
        out = self.rows(self.sparse(features))
        values = torch.cat([out[name] for name in self.features], dim=1)
        return self._output(keys=self.features, length_per_key=self._dims, values=values)


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
    - `optimizer`, `cache`, `store`, `seed`: as for `EmbeddingBagCollection`; `seed` for rows that are not copied.
    - `resume`: use the rows that the store already holds, instead of the collection's.
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
