"""The same run three times, compared bit by bit: with a cache, with every row resident, and in plain Python."""

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, Sparse, moved
from skirl.core.groups import Groups
from skirl.core.handle import TorchHandle
from skirl.core.once import Distinct
from skirl.core.reference import Bags, Reference, over_tree
from skirl.core.tables import Schema
from skirl.engine.access import peek
from skirl.engine.capacity import CacheSize
from skirl.engine.device import torch_device
from skirl.tools import rng_state
from skirl.tools.progress import Progress
from skirl.train.done import Done, whole
from skirl.train.fingerprints import Trace, compare
from skirl.train.flags import ShowFlags
from skirl.train.recipe import Recipe
from skirl.train.schedule import Rates
from skirl.train.touched import Touched
from skirl.train.train import steps


def touched_rows(recipe: Recipe) -> int:
    """Read all ids and return how many distinct rows the run will touch."""
    touched = Touched(recipe.tables())
    for batch in recipe.stream():
        touched.add(batch.sparse)
    return touched.rows


def verify(recipe: Recipe, touched: int, show: ShowFlags) -> dict[str, Any]:
    """Train three times. Return what was compared and the first difference, if any. touched: rows that the run uses."""
    started = time.monotonic()
    schema = Schema.of(recipe.tables())
    cached = with_cache("cache", recipe, recipe.cache_size(touched), show)
    in_memory = replace(recipe, cache=replace(recipe.cache, store="memory"))
    others = [with_cache("resident", in_memory, touched, show), in_plain_python(recipe, show)]
    found = (compare(cached, other, schema, recipe.in_steps()) for other in others)
    difference = next((d for d in found if d is not None), None)
    return {
        "optimizer": recipe.optimizer.optimizer,
        "difference": None if difference is None else {"text": str(difference), **asdict(difference)},
        "losses": len(cached.losses),
        "dense": cached.dense_size,
        "uses": sum(map(len, cached.after)),
        "rows": len(cached.keys),
        "width": cached.rows.shape[1],
        "cache": cached.cache,
        "moved": cached.moved,
        "resident_moved": others[0].moved,
        "seconds": time.monotonic() - started,
    }


def with_cache(name: str, recipe: Recipe, cache: CacheSize, show: ShowFlags) -> Trace:
    """Train with rows that travel between cache and store, and return the trace."""
    embeddings = recipe.embeddings(cache)
    model, dense = recipe.model_over(embeddings)
    rates, engine, trace = recipe.rates_of(embeddings, dense), embeddings.engine, Trace(name)
    with recipe.lookahead(model) as batches:
        read, shards = lambda keys: peek(engine, keys, 0)[0], recipe.step.shards
        done = trace.record(engine.schema, model, dense, rates, batches, read, shards)
        _watch(trace, recipe, show, done)
    embeddings.flush()
    trace.keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
    trace.rows = np.empty((len(trace.keys), engine.widths[0]), engine.dtype)
    engine.store.read(trace.keys, trace.rows)
    trace.cache, trace.moved = len(engine.caches[0]), asdict(engine.counters)
    embeddings.close()
    return trace


def in_plain_python(recipe: Recipe, show: ShowFlags) -> Trace:
    """Train with the reference, one row at a time, and return the trace."""
    reference, shards = Reference(recipe.tables(), recipe.row_optimizer(), recipe.data.seed), recipe.step.shards
    embeddings = PlainEmbeddings(reference, recipe.pooled, torch_device(recipe.device.device), shards)
    model, dense = recipe.model_over(embeddings)
    rates, trace, schema = recipe.rates_of(embeddings, dense), Trace("reference"), Schema.of(reference.tables)
    train = steps if shards == 1 else partial(plain_steps, seed=recipe.data.seed)
    _watch(
        trace,
        recipe,
        show,
        trace.record(schema, model, dense, rates, recipe.in_shards(), reference.read, shards, train),
    )
    trace.keys = np.array(sorted(reference.rows), np.int64)
    trace.rows = reference.read(trace.keys)
    return trace


def _watch(trace: Trace, recipe: Recipe, show: ShowFlags, done: Iterator[int]) -> None:
    title, to = f"{recipe.optimizer.optimizer}, {trace.name}", sys.stderr if show.json else sys.stdout
    with Progress(title, steps=recipe.stream().steps, to=to, quiet=show.quiet) as progress:
        for number in done:
            progress(number, lambda: {"loss": f"{trace.losses[-1]:.4f}"})


def plain_steps(
    model: nn.Module, dense: torch.optim.Optimizer, batches: Iterable[Batch], rates: Rates, shards: int, *, seed: int
) -> Iterator[Done]:
    """Train as `steps` does over a lookahead with shards: each shard by itself, then sum their gradients as a tree."""
    weights = [weight for weight in model.parameters() if weight.numel()]
    parts: list[Batch] = []
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    grads: list[dict[int, Any]] = [{} for _ in weights]
    for number, batch in enumerate(batches):
        step, shard = divmod(number, shards)
        rng_state.swap_in(seed, step + 1, shard)
        logit = model(batch)
        loss = binary_cross_entropy_with_logits(logit, moved(batch.labels, logit.device, logit.dtype))
        dense.zero_grad()
        loss.backward()
        rng_state.swap_out()
        for of_weight, weight in zip(grads, weights, strict=True):
            if weight.grad is not None:
                of_weight[shard] = weight.grad
        parts, logits, losses = [*parts, batch], [*logits, logit.detach()], [*losses, loss.detach()]
        if len(parts) == shards:
            for of_weight, weight in zip(grads, weights, strict=True):
                total = over_tree(of_weight, 0, shards)
                weight.grad = None if total is None else total / shards + 0.0
                of_weight.clear()
            dense.step()
            rates.step()
            yield whole(parts, logits, losses)
            parts, logits, losses = [], [], []


class PlainEmbeddings(nn.Module):
    """The plain reference in place of an EmbeddingBagCollection or, with pooled=False, of an EmbeddingCollection.

    >>> import skirl
    >>> plain = PlainEmbeddings(Reference([skirl.Table("t", rows=10, dim=2)], skirl.SGD(lr=1.0)))
    >>> plain(skirl.KeyedJagged.one_hot(["t"], torch.tensor([[3], [4]]))).stacked().sum().backward()
    >>> sorted(plain.reference.rows)
    [3, 4]
    """

    def __init__(
        self, reference: Reference, pooled: bool = True, at: str | torch.device = "cpu", shards: int = 1
    ) -> None:
        super().__init__()
        self.shards = shards
        self.grads: list[dict[str, np.ndarray | None]] = []
        """Gradients of the shards of this step whose backward has run."""
        self.reference = reference
        self.tables = reference.tables
        self.pooled = pooled
        self.at = at
        self.anchor = torch.zeros((), device=at, requires_grad=True)  # so that autograd calls our backward
        groups = Groups(reference.tables, reference.optimizers[0])
        self.optimizer = TorchHandle(groups, at)  # the learning rate of the next backward

    def forward(self, sparse: Sparse) -> "PlainRows":
        bags = whole = _bags(sparse)
        if not self.pooled:
            bags = {name: _one_by_one(of) for name, of in whole.items()}
        names = [name for table in self.tables for name in table.features]
        rows = zip(names, _Plain.apply(self.anchor, self, bags, names), strict=True)
        return PlainRows(rows, whole, self.pooled)


class PlainRows(dict[str, Tensor]):
    """The output of the plain embeddings: a tensor for each feature, by name."""

    def __init__(self, rows: Iterable[tuple[str, Tensor]], bags: dict[str, Bags], pooled: bool) -> None:
        super().__init__(rows)
        self._bags, self._pooled = bags, pooled

    def distinct(self, name: str) -> Distinct:
        """Return a feature with each bag once, with the rows of the first sample that has it."""
        _, ends, _, *inverse = self._bags[name]
        sizes = [1 if self._pooled else end - begin for begin, end in pairwise(ends)]
        samples = [*inverse[0]] if inverse else [*range(len(sizes))]
        begins = [*accumulate((sizes[bag] for bag in samples), initial=0)]
        rows = [begins[samples.index(bag)] + i for bag, size in enumerate(sizes) for i in range(size)]
        at = self[name].device
        offsets = torch.tensor([*accumulate(sizes, initial=0)], device=at)
        return Distinct(
            self[name][torch.tensor(rows, dtype=torch.int64, device=at)], offsets, torch.tensor(samples, device=at)
        )

    def stacked(self) -> Tensor:
        """Return all features as one [batch, features, dim] tensor."""
        return torch.stack(list(self.values()), dim=1)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, plain: PlainEmbeddings, bags: dict[str, Bags], names: list[str]
    ) -> tuple[Tensor, ...]:
        ctx.plain, ctx.names = plain, names
        ctx.set_materialize_grads(False)  # a feature that the loss does not use gets no gradient, and its rows stay
        out = plain.reference.forward(bags, accumulate=len(plain.grads) > 0)
        return tuple(torch.from_numpy(out[name]).to(plain.at) for name in names)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        named = {
            name: None if grad is None else grad.cpu().numpy() for name, grad in zip(ctx.names, grads, strict=True)
        }
        plain = ctx.plain
        plain.grads.append(named)
        if len(plain.grads) == plain.shards:
            plain.reference.backward(*plain.grads, lr=plain.optimizer.lr, shards=plain.shards)
            plain.grads.clear()
        return None, None, None, None


def _one_by_one(bags: Bags) -> Bags:
    """Make each id a bag of its own. The ids of a sample are those of its former bag."""
    ids, offsets, ends = bags[0], bags[1], range(len(bags[0]) + 1)
    if len(bags) == 3:
        return ids, ends, None
    return ids, ends, None, [i for bag in bags[3] for i in range(offsets[bag], offsets[bag + 1])]


def _bags(sparse: Sparse) -> dict[str, Bags]:
    """Return ids, offsets and weights of each feature as lists, and each sample's bag if samples share bags."""
    names, values, weights = sparse.keys(), sparse.values().tolist(), sparse.weights_or_none()
    offsets = sparse.offsets().tolist()
    of = _inverse(sparse)
    strides = [(len(offsets) - 1) // len(names)] * len(names)
    if of is not None:
        strides = sparse.stride_per_key()  # type: ignore[attr-defined]
    bags: dict[str, Bags] = {}
    for i, name in enumerate(names):
        first = sum(strides[:i])
        ends = offsets[first : first + strides[i] + 1]
        part = slice(ends[0], ends[-1])
        own = None if weights is None else weights[part].tolist()
        plain = values[part], [end - ends[0] for end in ends], own
        bags[name] = plain if of is None else (*plain, of[name].tolist())
    return bags


def _inverse(sparse: Sparse) -> dict[str, Tensor] | None:
    """Return the bag of each sample, by feature; None for a plain batch."""
    shares = getattr(sparse, "inverse_indices_or_none", lambda: None)()
    return None if shares is None else dict(zip(*shares, strict=True))
