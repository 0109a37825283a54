"""Drop-ins: `EmbeddingBag` for nn.EmbeddingBag, and `wrap` for all lookups of a model, also of TorchRec, never imported."""

import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from skirl.core.batch import KeyedJagged
from skirl.core.groups import RowOptimizers
from skirl.core.ids import capture, hashes_of
from skirl.core.initial import Initial, Normal
from skirl.core.tables import Table
from skirl.engine.access import put_weight
from skirl.engine.capacity import CacheSize
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection
from skirl.nn.output import uncompiled
from skirl.store import Store


class _Lookups(nn.Module):
    """What stands where a module looked up rows of its own: it looks up features of a collection."""

    rows: Collection
    sparse: Callable[..., KeyedJagged]
    """Returns the ids of a call, given its arguments."""
    pooled = True

    def __init__(self, was: Any, tables: Sequence[Table]) -> None:
        super().__init__()
        self._modes = {name: table.pooling for table in tables for name in table.features}
        self._was = was if isinstance(was, str) else repr(was)

    def extra_repr(self) -> str:
        return self._was

    def _named(self, ids: Tensor, name: str | None = None, **more: Any) -> KeyedJagged:
        return KeyedJagged([name or next(iter(self._modes))], ids, **more)

    @uncompiled
    def _found(self, ids: KeyedJagged) -> list[Tensor]:
        """Look up the ids of a call: a tensor for each of its features."""
        trains = self.training and torch.is_grad_enabled()
        out = self.rows(self._in_loop(ids) if trains else ids)
        if self.rows.pooled or not self.pooled:
            return list(out.values())
        if ids.weights_or_none() is not None:
            raise ValueError(
                "ids have weights beside lookups that pool nothing: leave one kind as it is, skirl.wrap(skip=...)"
            )
        return [out.pooling(self._modes[name])[name] for name in out]

    def _in_loop(self, ids: KeyedJagged) -> KeyedJagged:
        """Return the ids of a call as the batch in the loop has them: by their name, with weights if others have some."""
        work, of = self.rows.current.work, self.rows.engine.schema.features
        if self.rows.lookahead is None and len(ids.keys()) < len(of):
            raise RuntimeError(
                "a step needs the ids of all lookups: train under skirl.lookahead(loader, model, sparse=lambda batch: "
                "wrapped.sparse(...)), where wrapped is what skirl.wrap has returned"
            )
        if self.rows.lookahead is None or work is None:
            return ids
        batch = work.micros[self.rows.current.micro]
        ids = _merged([ids], weighted=batch.weights is not None)
        if len(ids.keys()) < len(self._modes):  # one call of several
            [now] = hashes_of(capture(ids, (), copy=False)).values()
            name = next((name for name in self._modes if batch.hashes.get(name) == now), None)
            ids = self._named(ids.values(), name, offsets=ids.offsets(), weights=ids.weights_or_none())
        return ids


class _Bags(_Lookups):
    """Takes the arguments of nn.EmbeddingBag."""

    def __init__(self, was: nn.EmbeddingBag, tables: Sequence[Table]) -> None:
        super().__init__(was, tables)
        self.mode, self.include_last_offset, self.padding_idx = was.mode, was.include_last_offset, was.padding_idx

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
            ends = torch.arange(len(input) + 1) * input.shape[1]
        elif input.dim() == 1 and offsets is not None:
            ends = offsets.to(torch.int64)
            if not self.include_last_offset:
                ends = torch.cat([ends, ends.new_tensor([input.numel()])])
            if not ends.numel() or ends[0] != 0 or ends[-1] > input.numel() or (ends.diff() < 0).any():
                raise ValueError(
                    f"offsets have to ascend from 0 to at most {input.numel()} ids: pass where each bag begins"
                )
        else:
            raise ValueError(f"input is {list(input.shape)}: pass [bags, ids], or one dimension and offsets")
        ids, weights = input.reshape(-1)[: ends[-1]], per_sample_weights
        weights = None if weights is None else weights.reshape(-1)[: ends[-1]]
        if self.padding_idx is not None:
            here = ids != self.padding_idx
            ends = torch.cat([ends.new_zeros(1), here.cumsum(0)])[ends]
            ids, weights = ids[here], None if weights is None else weights[here]
        return self._named(ids, offsets=ends, weights=weights)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool, as torch's module does: `[bags, embedding_dim]`."""
        return self._found(self.sparse(input, offsets, per_sample_weights))[0]


class EmbeddingBag(_Bags):
    """A drop-in for nn.EmbeddingBag: the same arguments, plus those for moving rows: an optimizer, a cache, a store.

    It works as it is, without a lookahead. With one, say which ids a batch has:
    `skirl.lookahead(loader, model, sparse=lambda batch: model.bag.sparse(batch.ids, batch.offsets))`.
    A model with several bags should use one `EmbeddingBagCollection` instead, so that they share a cache.

    **Arguments**

    - all up to `dtype`: as in torch. `max_norm`, `scale_grad_by_freq` and the mode "max" are refused; `sparse` has no
      effect. Rows of `_weight` are all stored.
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
        weight = torch.empty(num_embeddings, embedding_dim, device="meta") if _weight is None else _weight
        was = nn.EmbeddingBag(
            num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, weight,
            include_last_offset, padding_idx,
        )  # fmt: skip
        if wrong := _otherwise(was, was):
            raise ValueError(f"the bag {wrong}: leave that out, and set clip of the optimizer, or use Adagrad")
        table = Table("weight", num_embeddings, embedding_dim, pooling=mode, init=Normal(1.0) if init is None else init)  # type: ignore[arg-type]
        super().__init__(was, [table])
        self._was = was.extra_repr()
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


class _Rows(_Lookups):
    """Takes the argument of nn.Embedding."""

    pooled = False

    def __init__(self, was: nn.Embedding, tables: Sequence[Table]) -> None:
        super().__init__(was, tables)
        self.padding_idx = was.padding_idx

    def _here(self, input: Tensor) -> Tensor:
        return torch.ones_like(input, dtype=torch.bool) if self.padding_idx is None else input != self.padding_idx

    def sparse(self, input: Tensor) -> KeyedJagged:
        """Return the ids of a batch, a bag for each entry of the first dimension."""
        here, samples = self._here(input), len(input) if input.dim() else 1
        return self._named(input[here], lengths=here.reshape(samples, input.numel() // max(samples, 1)).sum(1))

    def forward(self, input: Tensor) -> Tensor:
        [rows] = self._found(self.sparse(input))
        if self.padding_idx is None:
            return rows.view(*input.shape, rows.shape[1])
        return rows.new_zeros(*input.shape, rows.shape[1]).index_put((self._here(input),), rows)


class _OfTorchRec(_Lookups):
    """Takes and returns what a collection of TorchRec does."""

    def __init__(self, theirs: Any, tables: Sequence[Table]) -> None:
        super().__init__(theirs, tables)
        self._was = type(theirs).__name__
        self.pooled = hasattr(theirs, "embedding_bag_configs")
        modules = [sys.modules[kind.__module__] for kind in type(theirs).__mro__]  # it may be a subclass of theirs
        name = "KeyedTensor" if self.pooled else "JaggedTensor"
        self._output = next(getattr(module, name) for module in modules if hasattr(module, name))
        self._weighted = self.pooled and bool(theirs.is_weighted())
        self._gives_ids = not self.pooled and theirs.need_indices()

    def sparse(self, features: Any) -> KeyedJagged:
        """Return the ids of a batch. A collection that is not weighted drops weights, as TorchRec's does."""
        ids = KeyedJagged.of(features).select([*self._modes])
        return ids if self._weighted or ids.weights_or_none() is None else ids.unweighted()

    def forward(self, features: Any) -> Any:
        ids = self.sparse(features)
        found = dict(zip(self._modes, self._found(ids), strict=True))
        if self.pooled:
            widths = [vectors.shape[1] for vectors in found.values()]
            return self._output(keys=[*found], length_per_key=widths, values=torch.cat([*found.values()], dim=1))
        lengths = ids.lengths_by_sample()
        values = {name: ids.select([name]).expanded().values() if self._gives_ids else None for name in found}
        return {name: self._output(rows, lengths=lengths[name], weights=values[name]) for name, rows in found.items()}


def _merged(parts: Sequence[KeyedJagged], weighted: bool = False) -> KeyedJagged:
    """Return the features of several batches of the same samples as one batch."""
    given = [part.weights_or_none() for part in parts]
    weights = [torch.ones(len(part.values())) if one is None else one for part, one in zip(parts, given)]
    inverse = {names: of for part in parts for names, of in part.groups.items()} or None
    return KeyedJagged(
        [name for part in parts for name in [*part.keys()]],
        torch.cat([part.values() for part in parts]),
        lengths=torch.cat([part.lengths() for part in parts]),
        weights=torch.cat(weights) if weighted or any(one is not None for one in given) else None,
        strides=[stride for part in parts for stride in part.stride_per_key()] if inverse else None,
        inverse=inverse,
    )


class Wrapped:
    """What `skirl.wrap` has put into a model."""

    def __init__(self, embeddings: Collection, lookups: Mapping[str, _Lookups]) -> None:
        self.embeddings = embeddings
        """The collection that has the rows of all that was replaced."""
        self.replaced = {name: lookup.extra_repr() for name, lookup in lookups.items()}
        """What was replaced, by the name of the module."""
        self._calls = {
            call: lookup
            for name, lookup in lookups.items()
            for call in ([name] if isinstance(lookup, _OfTorchRec) else lookup._modes)
        }

    def sparse(self, **calls: Any) -> KeyedJagged:
        """Return the ids of a batch, for a lookahead.

        **Arguments**

        - `calls`: by the name of a module, or of each of its `features`, what the model passes to it: a tensor, a tuple of
          the arguments, or the ids of a TorchRec collection.
        """
        if calls.keys() != self._calls.keys():
            raise ValueError(f"sparse() got {', '.join(calls) or 'nothing'}: give it {'=, '.join(self._calls)}=")
        parts = {}
        for name, lookup in self._calls.items():
            part = lookup.sparse(*(calls[name] if isinstance(calls[name], tuple) else (calls[name],)))
            if name in lookup._modes:
                part = lookup._named(part.values(), name, offsets=part.offsets(), weights=part.weights_or_none())
            parts[name] = part
        if len({part.stride() for part in parts.values()}) > 1:
            each = ", ".join(f"{name}: {part.stride()}" for name, part in parts.items())
            raise ValueError(
                f"lookups have different numbers of samples ({each}): leave one that is not by sample as it is, "
                "skirl.wrap(skip=...)"
            )
        return _merged([*parts.values()])

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {was}" for name, was in self.replaced.items())


def wrap(
    model: nn.Module,
    *,
    optimizer: RowOptimizers,
    cache: CacheSize,
    store: str | Store = "memory",
    seed: int = 0,
    resume: bool = False,
    features: Mapping[str, Sequence[str]] | None = None,
    skip: Sequence[str] = (),
) -> Wrapped:
    """Replace every nn.EmbeddingBag, nn.Embedding and TorchRec collection of a model, in place, by one collection.

    Rows are copied as they are; a module on the meta device has none, and starts from initial values. What would train
    otherwise is refused. The old parameters are gone, so make dense optimizers afterwards.

    **Arguments**

    - `model`: the model. Each module that is replaced becomes a table of its name, a TorchRec collection its tables.
    - `optimizer`, `cache`, `store`, `seed`: as for `EmbeddingBagCollection`.
    - `resume`: use the rows that the store already holds, instead of the model's.
    - `features`: by module that the model calls several times for a batch, a name for each call.
    - `skip`: names or patterns of modules to leave as they are: what is small, or not by sample.

    >>> import skirl
    >>> model = nn.ModuleDict({"user": nn.EmbeddingBag(100, 4, mode="sum"), "item": nn.Embedding(50, 4)})
    >>> wrapped = wrap(model, optimizer=skirl.SGD(lr=0.1), cache="20%")
    >>> wrapped
    user: EmbeddingBag(100, 4, mode='sum')
    item: Embedding(50, 4)
    >>> loader = [(torch.tensor([[1, 2]]), torch.tensor([3]))] * 2
    >>> with skirl.lookahead(loader, model, sparse=lambda batch: wrapped.sparse(user=batch[0], item=batch[1])) as batches:
    ...     for user, item in batches:
    ...         (model["user"](user) * model["item"](item)).sum().backward()
    """
    found, left, lookups = dict[str, Any](), list[str](), dict[str, _Lookups]()
    tables, weights = list[Table](), list[Tensor]()
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in (*found, *left))  # a collection of TorchRec
        if inside or not (_is_of_torchrec(module) or isinstance(module, nn.Embedding | nn.EmbeddingBag)):
            continue
        if any(fnmatchcase(name, pattern) for pattern in skip):
            left.append(name)
            continue
        if not name:
            raise ValueError(
                "the model is itself what is to be replaced: put it into a module, or use skirl.EmbeddingBag"
            )
        if wrong := _otherwise(model, module):
            raise ValueError(f"{name!r} {wrong}: change that, or leave it as it is, skip=[{name!r}]")
        found[name] = module
        of = _tables(module, name, (features or {}).get(name, [name]))
        lookups[name] = _KINDS.get(type(module), _OfTorchRec)(module, [*of])
        tables += of.keys()
        weights += of.values()
    if missing := {*(features or {})} - {*found}:
        raise ValueError(f"features names {min(missing)!r}: name some of {', '.join(found)}")
    if not found:
        raise ValueError("the model has nothing to replace: no nn.EmbeddingBag, nn.Embedding or collection of TorchRec")
    if len(kinds := {str(weight.dtype) for weight in weights}) > 1:
        raise ValueError(
            f"rows are {' and '.join(sorted(kinds))}: make them alike, or leave some as they are, skip=[...]"
        )
    pools = all(one.pooled for one in lookups.values())
    at = next((weight.device for weight in weights if not weight.is_meta), "cpu")
    embeddings = (EmbeddingBagCollection if pools else EmbeddingCollection)(
        tables,
        optimizer=optimizer,
        cache=cache,
        store=store,
        device=at,
        seed=seed,
        dtype=weights[0].dtype,
        resume=resume,
    )
    for number, weight in enumerate(weights):
        if not resume and not weight.is_meta and not embeddings.engine.store.read_only:
            put_weight(embeddings.engine, number, weight)
        if not weight.requires_grad:
            embeddings.freeze(tables[number].name)
    places = {id(module): lookups[name] for name, module in found.items()}
    for parent in [*model.modules()]:
        for child, module in [*parent._modules.items()]:
            if module is not None and id(module) in places:
                setattr(parent, child, places[id(module)].train(module.training))
    for lookup in lookups.values():
        lookup.rows = embeddings
    return Wrapped(embeddings, lookups)


_KINDS: dict[type[Any], type[_Lookups]] = {nn.EmbeddingBag: _Bags, nn.Embedding: _Rows}


def _is_of_torchrec(module: nn.Module) -> bool:
    return hasattr(module, "is_weighted" if hasattr(module, "embedding_bag_configs") else "embedding_configs")


def _otherwise(model: nn.Module, module: Any) -> str | None:
    """Return why a collection would not train the rows of a module as they are trained now; None if it would."""
    weights, inside = {id(weight) for weight in module.parameters()}, {id(each) for each in module.modules()}
    if any(id(w) in weights for each in model.modules() if id(each) not in inside for w in each._parameters.values()):
        return "shares its weight with another module"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "has hooks, which would be lost"
    if _is_of_torchrec(module):
        return None
    if type(module) not in _KINDS:
        return f"is a {type(module).__name__}, whose forward may do more than torch's"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "has max_norm or scale_grad_by_freq, which a collection does not have"
    padding = None if isinstance(module, nn.EmbeddingBag) or module.weight.is_meta else module.padding_idx
    return None if padding is None or not module.weight[padding].any() else "has a row of padding that is not zero"


def _tables(module: Any, name: str, features: Sequence[str]) -> dict[Table, Tensor]:
    """Return the tables of a module, with their weights. Rows of torch's on the meta device begin as torch begins them."""
    if not _is_of_torchrec(module):
        mode: Any = getattr(module, "mode", "sum")
        rows, dim = module.weight.shape
        return {Table(name, rows, dim, tuple(features), mode, Normal(1.0)): module.weight}
    kind = "embedding_bag" if hasattr(module, "embedding_bag_configs") else "embedding"
    weights, found = dict(module.named_parameters()), dict[Table, Tensor]()
    for of in getattr(module, f"{kind}_configs")():
        mode = of.pooling.name.lower() if kind == "embedding_bag" else "sum"
        table = Table(of.name, of.num_embeddings, of.embedding_dim, tuple(of.feature_names), mode)
        found[table] = weights[f"{kind}s.{of.name}.weight"]
    return found
