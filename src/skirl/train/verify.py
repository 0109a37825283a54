"""The same run three times, compared bit by bit: with a cache, with every row resident, and in plain Python."""

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from skirl.core.batch import Batch, KeyedJagged, Sparse, moved
from skirl.core.groups import Groups, TorchHandle
from skirl.core.once import Distinct
from skirl.core.reference import Bags, Reference, over_tree
from skirl.core.tables import MAX_ROWS, ROW_BITS, Schema
from skirl.engine.capacity import CacheSize
from skirl.engine.device import torch_device
from skirl.nn.collection import Collection
from skirl.pipeline.lookahead import Lookahead
from skirl.tools import rng_state
from skirl.tools.progress import progress_of
from skirl.train.loop import Done, keys_of, steps, whole
from skirl.train.recipe import Recipe
from skirl.train.schedule import Rates


@dataclass
class Trace:
    name: str
    losses: list[float]
    """Of each step."""
    dense: dict[str, np.ndarray]
    """Dense parameters at the end."""
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """All that have a row at the end, ascending."""
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    cache: int = 0
    moved: dict[str, int] = field(default_factory=dict)


def trained(name: str, recipe: Recipe, model: nn.Module, done: Iterable[Done]) -> Trace:
    losses: list[float] = []
    with progress_of(f"{recipe.optimizer.optimizer}, {name}", recipe.stream().steps) as progress:
        for step in done:
            losses.append(step.loss)
            progress(len(losses), lambda: {"loss": f"{losses[-1]:.4f}"})
    weights = [(n, w) for n, w in model.named_parameters() if w.numel()]  # embeddings have an empty one
    return Trace(name, losses, {n: w.detach().cpu().numpy() for n, w in weights})


def compare(one: Trace, other: Trace, schema: Schema) -> str | None:
    """Return the first difference between two runs, or None. What goes wrong in a row shows in a loss, or at the end."""
    names = f"{one.name} and {other.name} differ"
    for step, losses in enumerate(zip(one.losses, other.losses, strict=True), start=1):
        if len({np.float64(loss).tobytes() for loss in losses}) > 1:
            return f"{names} first in step {step}: the losses are {losses[0]!r} and {losses[1]!r}"
    for name, weights in one.dense.items():
        if weights.tobytes() != other.dense[name].tobytes():
            return f"{names} at the end: in dense parameter {name}"

    def row(key: int) -> str:
        return f"row {key & (MAX_ROWS - 1)} of table {schema.tables[key >> ROW_BITS].name!r}"

    only = np.setxor1d(one.keys, other.keys)
    if only.size:
        holder = one if np.isin(only[0], one.keys) else other
        return f"{names} at the end: only {holder.name} has {row(int(only[0]))}"
    wrong = np.flatnonzero((one.rows.view(np.uint32) != other.rows.view(np.uint32)).any(axis=1))
    if wrong.size:
        return f"{names} at the end: in {wrong.size} rows, the first of them {row(int(one.keys[wrong[0]]))}"
    return None


class Delays:
    """Slows the stages of a lookahead in turns, write-backs in every second one, the others in an order drawn by seed. What
    is slow goes on when all else waits for it, whatever the clock says; at the latest after so many seconds."""

    def __init__(self, batches: Lookahead, seed: int, seconds: float = 10.0) -> None:
        self._order = random.Random(seed).sample(("plan", "fetch", "load"), 3)
        self._batches, self._seconds = batches, seconds
        self._slow: set[str] = set()

    def __call__(self, stage: str, step: int) -> None:
        turn, writes = divmod(step // 6, 2)
        if stage == ("write" if writes else self._order[turn % len(self._order)]):
            end = time.monotonic() + self._seconds
            self._slow.add(stage)
            while not self._batches.all_wait({stage, *self._slow}) and time.monotonic() < end:
                time.sleep(0.001)
            self._slow.discard(stage)


NOTHING_SHOWN = "no row was refetched, so nothing was shown: leave --cache out, or set more --steps"


def cache_of(recipe: Recipe, touched: int) -> CacheSize:
    """Return the cache of a run. With "auto" it holds little more than the largest step: rows leave it, and come back."""
    if recipe.cache.cache != "auto":
        return recipe.cache_size(touched)
    schema = Schema.of(recipe.tables())
    largest = max(len(np.unique(keys_of(batch.sparse, schema))) for batch in recipe.stream())
    return largest + largest // 5


def verify(recipe: Recipe, touched: int) -> dict[str, Any]:
    """Train three times. Return what was compared and the first difference, if any. touched: rows that the run uses."""
    started = time.monotonic()
    schema = Schema.of(recipe.tables())
    cached = with_cache("cache", recipe, cache_of(recipe, touched), slow=True)
    in_memory = replace(recipe, cache=replace(recipe.cache, store="memory"))
    others = [with_cache("resident", in_memory, touched), in_plain_python(recipe)]
    found = (compare(cached, other, schema) for other in others)
    return {
        "optimizer": recipe.optimizer.optimizer,
        "difference": next((d for d in found if d is not None), None),
        "losses": len(cached.losses), "dense": sum(weights.size for weights in cached.dense.values()),
        "rows": len(cached.keys), "width": cached.rows.shape[1], "cache": cached.cache, "moved": cached.moved,
        "resident_moved": others[0].moved, "seconds": time.monotonic() - started,
    }  # fmt: skip


def with_cache(name: str, recipe: Recipe, cache: CacheSize, slow: bool = False) -> Trace:
    embeddings = recipe.embeddings(cache)
    model, dense = recipe.model_over(embeddings)
    rates, engine = recipe.rates_of(embeddings, dense), embeddings.engine
    with recipe.lookahead(model) as batches:
        batches.hook = Delays(batches, recipe.data.seed) if slow else None
        trace = trained(name, recipe, model, steps(model, dense, batches, rates, recipe.step.shards))
    trace.keys, trace.rows = stored(embeddings)
    trace.cache, trace.moved = len(engine.caches[0]), asdict(engine.counters)
    embeddings.close()
    return trace


def stored(embeddings: Collection) -> tuple[np.ndarray, np.ndarray]:
    embeddings.flush()
    engine, pack = embeddings.engine, embeddings.pack
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.held()]))
    rows = np.zeros((len(keys), pack.optimizers[0].width(pack.tables[0].dim)), engine.dtype)
    for bank, part in enumerate(engine.by_bank(keys)):
        records = np.empty((len(part), pack.widths[bank]), engine.dtype)
        engine.store.read(part, records)
        numbers = pack.optimizers[0].numbers_of(pack.tables[0].dim, pack.columns[bank].of_table)
        rows[np.searchsorted(keys, part)[:, None], numbers] = records  # others may have the other columns
    return keys, rows


def in_plain_python(recipe: Recipe) -> Trace:
    reference, shards = Reference(recipe.tables(), recipe.row_optimizer(), recipe.data.seed), recipe.step.shards
    embeddings = PlainEmbeddings(reference, recipe.pooled, torch_device(recipe.device.device), shards)
    model, dense = recipe.model_over(embeddings)
    rates, train = recipe.rates_of(embeddings, dense), partial(plain_steps, seed=recipe.data.seed)
    done = (steps if shards == 1 else train)(model, dense, recipe.in_shards(), rates, shards)
    trace = trained("reference", recipe, model, done)
    trace.keys = np.array(sorted(reference.rows), np.int64)
    trace.rows = reference.read(trace.keys)
    return trace


def plain_steps(
    model: nn.Module, dense: torch.optim.Optimizer, batches: Iterable[Batch], rates: Rates, shards: int, *, seed: int
) -> Iterator[Done]:
    """Train as `steps` does over a lookahead with shards: each shard by itself, then sum their gradients as a tree."""
    weights = [weight for weight in model.parameters() if weight.numel()]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
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
        parts.append((logit.detach(), batch.labels, loss.detach()))
        if len(parts) == shards:
            for of_weight, weight in zip(grads, weights, strict=True):
                total = over_tree(of_weight, 0, shards)
                weight.grad = None if total is None else total / shards + 0.0
                of_weight.clear()
            dense.step()
            rates.step()
            yield whole(parts)
            parts = []


class PlainEmbeddings(nn.Module):
    """The plain reference in place of an EmbeddingBagCollection or, with pooled=False, of an EmbeddingCollection."""

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
    def __init__(self, rows: Iterable[tuple[str, Tensor]], bags: dict[str, Bags], pooled: bool) -> None:
        super().__init__(rows)
        self._bags, self._pooled = bags, pooled

    def distinct(self, name: str) -> Distinct:
        """Each bag once, with the rows of the first sample that has it."""
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
            plain.reference.backward(*plain.grads, lr=plain.optimizer.param_groups[0]["lr"], shards=plain.shards)
            plain.grads.clear()
        return None, None, None, None


def _one_by_one(bags: Bags) -> Bags:
    """Make each id a bag of its own. The ids of a sample are those of its former bag."""
    ids, offsets, ends = bags[0], bags[1], range(len(bags[0]) + 1)
    if len(bags) == 3:
        return ids, ends, None
    return ids, ends, None, [i for bag in bags[3] for i in range(offsets[bag], offsets[bag + 1])]


def _bags(sparse: Sparse) -> dict[str, Bags]:
    """Ids, offsets and weights of each feature as lists, and each sample's bag if samples share bags."""
    batch = KeyedJagged.of(sparse)
    names, values, weights = batch.keys(), batch.values().tolist(), batch.weights_or_none()
    offsets, strides = batch.offsets().tolist(), batch.stride_per_key()
    of = {name: inverse for some, inverse in batch.groups.items() for name in some}
    own_bags = torch.arange(batch.stride())
    bags: dict[str, Bags] = {}
    for i, name in enumerate(names):
        first = sum(strides[:i])
        ends = offsets[first : first + strides[i] + 1]
        part = slice(ends[0], ends[-1])
        own = None if weights is None else weights[part].tolist()
        plain = values[part], [end - ends[0] for end in ends], own
        bags[name] = (*plain, of.get(name, own_bags).tolist()) if of else plain
    return bags
