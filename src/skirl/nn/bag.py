"""`EmbeddingBag`: torch's own, its rows outside the device.

A model that holds one nn.EmbeddingBag changes one line. The module turns what torch's takes (bags as rows of a matrix, or
ids and offsets) into the ids of a collection of one table, at the price of one small object a call; padding is taken out
there, so a padded id is neither looked up nor trained. What cannot be had by rows that move is refused, not ignored. A model
with several bags makes one `EmbeddingBagCollection` of them: they share a cache and a lookahead then.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from skirl.core.batch import KeyedJagged
from skirl.core.initial import Initial, Normal
from skirl.core.optim import RowOptimizer
from skirl.core.tables import Pooling, Table
from skirl.engine.access import put_weight
from skirl.engine.capacity import CacheSize
from skirl.nn.collection import EmbeddingBagCollection
from skirl.store import Store


class EmbeddingBag(nn.Module):
    """A drop-in for nn.EmbeddingBag: the same arguments, and what rows that move need: an optimizer, a cache, a store.

    Without a lookahead it works as it stands. With one, tell the lookahead which ids a batch has:
    `skirl.lookahead(loader, model, sparse=lambda batch: model.bag.sparse(batch.ids, batch.offsets))`.

    >>> import skirl
    >>> bag = EmbeddingBag(1000, 4, mode="sum", optimizer=skirl.SGD(lr=0.1), cache=10)
    >>> bag(torch.tensor([1, 2, 4, 5]), torch.tensor([0, 3])).shape
    torch.Size([2, 4])
    >>> EmbeddingBag(1000, 4, mode="max", optimizer=skirl.SGD(lr=0.1), cache=10)
    Traceback (most recent call last):
    ValueError: mode is 'max': set it to 'sum' or 'mean'
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
        optimizer: RowOptimizer,
        cache: CacheSize,
        store: str | Store = "memory",
        seed: int = 0,
        init: Initial | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__()
        if max_norm is not None or norm_type != 2.0:
            raise ValueError("max_norm changes rows where they are looked up: use the optimizer's clip for gradients")
        if scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq is not supported: leave it out, and use Adagrad for frequent ids")
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode is {mode!r}: set it to 'sum' or 'mean'")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}: set it to a row, of {num_embeddings}")
        if _weight is not None and tuple(_weight.shape) != (num_embeddings, embedding_dim):
            raise ValueError(f"_weight is {list(_weight.shape)}: pass [{num_embeddings}, {embedding_dim}]")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode: Pooling = "mean" if mode == "mean" else "sum"
        self.include_last_offset = include_last_offset
        self.padding_idx = padding_idx + num_embeddings if padding_idx is not None and padding_idx < 0 else padding_idx
        table = Table("weight", num_embeddings, embedding_dim, pooling=self.mode, init=init or Normal(1.0))
        self.rows = EmbeddingBagCollection(
            [table], optimizer=optimizer, cache=cache, store=store, device=device or "cpu", seed=seed,
            dtype=dtype or torch.float32, resume=resume,
        )  # fmt: skip
        if _weight is not None:
            put_weight(self.rows.engine, 0, _weight)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, **options: Any) -> "EmbeddingBag":
        """With these rows; trained further unless the model is in eval mode."""
        if options.pop("freeze", False):
            raise ValueError("rows are trained by backward: leave freeze out, and call eval() to keep them")
        rows, dim = embeddings.shape
        return cls(rows, dim, _weight=embeddings, **options)

    @property
    def optimizer(self) -> Any:
        """The rows' learning rate, for torch's schedulers."""
        return self.rows.optimizer

    def sparse(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> KeyedJagged:
        """The ids of a call, as a lookahead needs them."""
        if per_sample_weights is not None and self.mode != "sum":
            raise ValueError(f"per_sample_weights go with mode='sum', and mode is {self.mode!r}")
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ValueError(f"per_sample_weights are {list(per_sample_weights.shape)}, input is {list(input.shape)}")
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets are for a one-dimensional input: leave them out")
            bags, each = input.shape
            ends = torch.arange(0, bags * each + 1, each) if each else torch.zeros(bags + 1, dtype=torch.int64)
        elif input.dim() == 1 and offsets is not None:
            ends = offsets.to(torch.int64)
            if not self.include_last_offset:
                ends = torch.cat([ends, ends.new_tensor([input.numel()])])
            if not ends.numel() or ends[0] != 0 or ends[-1] > input.numel() or (ends.diff() < 0).any():
                raise ValueError(f"offsets have to ascend from 0 to at most {input.numel()}")
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
        """As torch's: [bags, embedding_dim]."""
        return self.rows(self.sparse(input, offsets, per_sample_weights))["weight"]

    def extra_repr(self) -> str:
        """As torch's."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"
