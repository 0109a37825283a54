"""The same run three times, compared bit by bit: with a cache, with every row resident, and in plain Python."""

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from skirl.engine.access import peek
from skirl.engine.capacity import CacheSize
from skirl.engine.device import torch_device
from skirl.nn.collection import Collection
from skirl.pipeline.lookahead import Lookahead
from skirl.tools import rng_state
from skirl.tools.progress import progress_of
from skirl.train.loop import Done, keys_of, steps, whole
from skirl.train.recipe import Recipe
from skirl.train.schedule import Rates

ReadRows = Callable[[np.ndarray], np.ndarray]
"""Returns the records of distinct, ascending keys."""


@dataclass
class Trace:
    name: str
    losses: list[float] = field(default_factory=list)
    dense: list[dict[str, bytes]] = field(default_factory=list)
    """A digest of every dense parameter after each step."""
    before: list[np.ndarray] = field(default_factory=list)
    """For each step, the fingerprints of its rows before it, by ascending key."""
    after: list[np.ndarray] = field(default_factory=list)
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """All that have a row at the end, ascending."""
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    cache: int = 0
    dense_size: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def record(
        self, schema: Schema, model: nn.Module, dense: torch.optim.Optimizer, rates: Rates, batches: Iterable[Batch],
        read: ReadRows, shards: int = 1, train: Callable[..., Iterator[Done]] = steps,
    ) -> Iterator[int]:  # fmt: skip
        """Train and record everything. Yield the number of steps done. train: a function with the arguments of `steps`."""

        def watched() -> Iterator[Batch]:
            step: list[Batch] = []
            for batch in batches:
                step.append(batch)
                if len(step) == shards:  # rows change after its last shard
                    self.before.append(fingerprints(read(rows_of(step, schema))))
                    step = []
                yield batch

        weights = [w for w in model.parameters() if w.numel()]  # embeddings have an empty one
        self.dense_size = {"parameters": len(weights), "numbers": sum(w.numel() for w in weights)}
        for done in train(model, dense, watched(), rates, shards):
            self.losses.append(done.loss)
            self.dense.append({name: digest(value) for name, value in model.named_parameters() if value.numel()})
            self.after.append(fingerprints(read(rows_of(done.batches, schema))))
            yield len(self.losses)


@dataclass(frozen=True)
class Difference:
    between: tuple[str, str]
    step: int
    what: str
    table: str | None = None
    row: int | None = None

    def __str__(self) -> str:
        where = "" if self.table is None else f", row {self.row} of table {self.table!r}"
        return f"{' and '.join(self.between)} differ first in step {self.step}{where}: {self.what}"


def compare(one: Trace, other: Trace, schema: Schema, steps: Iterable[Sequence[Batch]]) -> Difference | None:
    """The first difference between two runs over these batches, or None. Runs of several trainers have no fingerprints of
    rows at each step: a row that went wrong shows in a later loss, or at the end."""
    names = (one.name, other.name)

    def row(key: int, step: int, what: str) -> Difference:
        return Difference(names, step, what, schema.tables[key >> ROW_BITS].name, key & (MAX_ROWS - 1))

    trained: dict[int, int] = {}
    for step, batches in enumerate(steps, start=1):
        i, keys = step - 1, rows_of(batches, schema)
        stale = np.flatnonzero(one.before[i] != other.before[i]) if one.before else np.empty(0)
        wrong = np.flatnonzero(one.after[i] != other.after[i]) if one.after else np.empty(0)
        losses = f"the losses are {one.losses[i]!r} and {other.losses[i]!r}"
        if stale.size:
            key = int(keys[stale[0]])
            since = f"it was trained last in step {trained[key]}" if key in trained else "this is its first use"
            return row(key, step, f"{stale.size} of its {keys.size} rows differ before it; of this one {since}")
        if _bits(one.losses[i]) != _bits(other.losses[i]):
            if wrong.size:
                return row(int(keys[wrong[0]]), step, f"{losses}, all rows were equal before it")
            return Difference(names, step, losses)
        if wrong.size:
            return row(int(keys[wrong[0]]), step, f"{wrong.size} of its {keys.size} rows differ after it, none before")
        for name, digest in one.dense[i].items():
            if digest != other.dense[i][name]:
                return Difference(names, step, f"dense parameter {name} differs after it")
        trained.update(dict.fromkeys(keys.tolist(), step))
    only = np.setxor1d(one.keys, other.keys)
    if only.size:
        holder = one if np.isin(only[0], one.keys) else other
        return row(int(only[0]), trained.get(int(only[0]), 0), f"only {holder.name} has it at the end")
    lost = np.flatnonzero((one.rows.view(np.uint32) != other.rows.view(np.uint32)).any(axis=1))
    if lost.size:
        key = int(one.keys[lost[0]])
        return row(key, trained[key], "equal after it, but not at the end of the run")
    return None


def fingerprints(rows: np.ndarray) -> np.ndarray:
    """64 bits per row: a sum over its words, each times an odd number for its place, so one wrong bit always shows."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    odd = np.random.default_rng(0).integers(0, 1 << 63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * odd).sum(axis=1, dtype=np.uint64)


def digest(weights: Tensor | bytes) -> bytes:
    of = weights if isinstance(weights, bytes) else weights.detach().cpu().numpy().tobytes()
    return hashlib.blake2b(of, digest_size=16).digest()


def _bits(loss: float) -> bytes:
    return np.float64(loss).tobytes()


def rows_of(batches: Sequence[Batch], schema: Schema) -> np.ndarray:
    return np.unique(np.concatenate([keys_of(batch.sparse, schema) for batch in batches]))


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
    largest = max(len(rows_of(step, schema)) for step in recipe.in_steps())
    return largest + largest // 5


def verify(recipe: Recipe, touched: int) -> dict[str, Any]:
    """Train three times. Return what was compared and the first difference, if any. touched: rows that the run uses."""
    started = time.monotonic()
    schema = Schema.of(recipe.tables())
    cached = with_cache("cache", recipe, cache_of(recipe, touched), slow=True)
    in_memory = replace(recipe, cache=replace(recipe.cache, store="memory"))
    others = [with_cache("resident", in_memory, touched), in_plain_python(recipe)]
    found = (compare(cached, other, schema, recipe.in_steps()) for other in others)
    difference = next((d for d in found if d is not None), None)
    return {
        "optimizer": recipe.optimizer.optimizer,
        "difference": None if difference is None else {"text": str(difference), **asdict(difference)},
        "losses": len(cached.losses), "dense": cached.dense_size, "uses": sum(map(len, cached.after)),
        "rows": len(cached.keys), "width": cached.rows.shape[1], "cache": cached.cache, "moved": cached.moved,
        "resident_moved": others[0].moved, "seconds": time.monotonic() - started,
    }  # fmt: skip


def with_cache(name: str, recipe: Recipe, cache: CacheSize, slow: bool = False) -> Trace:
    embeddings = recipe.embeddings(cache)
    model, dense = recipe.model_over(embeddings)
    rates, engine, trace = recipe.rates_of(embeddings, dense), embeddings.engine, Trace(name)
    with recipe.lookahead(model) as batches:
        batches.hook = Delays(batches, recipe.data.seed) if slow else None
        read, shards = lambda keys: peek(engine, keys, 0), recipe.step.shards
        done = trace.record(engine.schema, model, dense, rates, batches, read, shards)
        _watch(trace, recipe, done)
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
    rates, trace, schema = recipe.rates_of(embeddings, dense), Trace("reference"), Schema.of(reference.tables)
    train = steps if shards == 1 else partial(plain_steps, seed=recipe.data.seed)
    _watch(
        trace,
        recipe,
        trace.record(schema, model, dense, rates, recipe.in_shards(), reference.read, shards, train),
    )
    trace.keys = np.array(sorted(reference.rows), np.int64)
    trace.rows = reference.read(trace.keys)
    return trace


def _watch(trace: Trace, recipe: Recipe, done: Iterator[int]) -> None:
    title = f"{recipe.optimizer.optimizer}, {trace.name}"
    with progress_of(title, recipe.stream().steps) as progress:
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
