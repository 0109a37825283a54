"""`skirl verify`: the same run three times, compared bit by bit.

    cache      rows travel between cache and store
    resident   a cache that holds every row the run touches: nothing travels
    reference  plain Python, one row at a time: reference.py

The runs go one after the other, so the first has the timing of a real run. In step with each other they would need no
trace, and the slowest, in Python, would give every row all the time it wants to arrive.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Sparse
from skirl.core.optim import TorchHandle
from skirl.core.reference import Bags, Reference
from skirl.core.tables import Schema
from skirl.engine.access import peek
from skirl.engine.capacity import CacheSize
from skirl.engine.device import torch_device
from skirl.tools.machine import machine
from skirl.tools.progress import Progress, clock
from skirl.train.fingerprints import Trace, compare
from skirl.train.recipe import ROW_OPTIMIZERS, ModelName, OptimizerName, Recipe, Touched


@dataclass(frozen=True)
class Verify(Recipe):
    """Train with a cache, with every row resident, and in plain Python; compare every bit.

    >>> result = Verify("synthetic:tiny", "dlrm-tiny", dim=4, batch=8, steps=20, quiet=True).run()
    >>> [(run["optimizer"], run["difference"]) for run in result["runs"]]
    [('rowwise-adagrad', None)]
    """

    model: ModelName = "dlrm-tiny"
    """The model, with the sizes of its paper; with -tiny some thousand weights."""
    optimizer: OptimizerName | Literal["all"] = "rowwise-adagrad"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The optimizer of the rows; dense weights have Adam. all: one after the other."""
    dim: int = 16
    """Numbers in the vector of one row; wide-deep and deepfm keep one more beside it, its first-order weight."""
    batch: int = field(default=256, kw_only=True)
    """Samples a step."""
    steps: int | None = field(default=30, kw_only=True)
    """Steps of the whole run."""
    cache: str = "touched:10%"
    """Rows on the device: a number, 10% (of all rows), 4GiB, or touched:10% (of those this run touches, counted first)."""
    json: bool = False
    """Print the results as one line of JSON; progress then goes to the standard error."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        self.recipes()  # each checks itself
        if self.dtype != "float32":
            raise ValueError(f"dtype is {self.dtype!r}: the reference rounds nothing to 16 bits, leave dtype out")
        self.check_labels()

    def run(self) -> dict[str, Any]:
        """Train three times with each optimizer; what was compared, and the first difference if there is one."""
        self.use_threads()
        touched = self._touched()
        runs = [self._verify(recipe, touched) for recipe in self.recipes()]
        differences = [f"{run['optimizer']}: {run['difference']['text']}" for run in runs if run["difference"]]
        return {
            "command": "verify",
            **asdict(self),
            "touched": touched,
            "runs": runs,
            "machine": machine(),
            "failed": "\n".join(differences) or None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        lines = {}
        for run in result["runs"]:
            moved, dense = run["moved"], run["dense"]
            lines[run["optimizer"]] = "\n".join(
                [
                    f"{'DIFFERENT' if run['difference'] else 'equal, bit for bit'} ({clock(run['seconds'])})",
                    f"{run['losses']:,} losses",
                    f"{dense['parameters']} dense parameters of {dense['numbers']:,} numbers, after every step",
                    f"{run['rows']:,} rows of {run['width']} numbers with their state, at the end",
                    f"{run['uses']:,} rows before and after a step that used them",
                    f"through a cache of {run['cache']:,} rows: {moved['new']:,} new, {moved['written']:,} written, "
                    f"{moved['fetched']:,} fetched again, {moved['forwarded']:,} of them out of a pending write",
                ]
                + ([] if moved["fetched"] else ["no row was fetched again: use a smaller --cache or more --steps"])
            )
        return lines

    def recipes(self) -> list[Recipe]:
        """One for each optimizer."""
        names = list(ROW_OPTIMIZERS) if self.optimizer == "all" else [self.optimizer]
        flags: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Recipe)}
        if self.optimizer == "all" and self.store != "memory":
            return [Recipe(**{**flags, "optimizer": name, "store": f"{self.store}/{name}"}) for name in names]
        return [Recipe(**{**flags, "optimizer": name}) for name in names]

    def _touched(self) -> int:
        """A pass over the ids: how many rows the run will touch."""
        touched = Touched(self.tables())
        for batch in self.stream():
            touched.add(batch.sparse)
        return touched.rows

    def _verify(self, recipe: Recipe, touched: int) -> dict[str, Any]:
        started = time.monotonic()
        schema = Schema.of(recipe.tables())
        cached = self._with_cache("cache", recipe, recipe.cache_size(touched))
        in_memory = replace(recipe, store="memory")
        others = [self._with_cache("resident", in_memory, touched), self._in_plain_python(recipe)]
        found = (compare(cached, other, schema, recipe.stream()) for other in others)
        difference = next((d for d in found if d is not None), None)
        return {
            "optimizer": recipe.optimizer,
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

    def _with_cache(self, name: str, recipe: Recipe, cache: CacheSize) -> Trace:
        embeddings = recipe.embeddings(cache)
        model, dense = recipe.model_over(embeddings)
        rates, engine, trace = recipe.rates(embeddings, dense), embeddings.engine, Trace(name)
        with recipe.lookahead(model) as batches:
            done = trace.record(engine.schema, model, dense, rates, batches, lambda keys: peek(engine, keys, 0)[0])
            self._watch(trace, recipe, done)
        embeddings.flush()
        trace.keys = np.sort(np.concatenate([np.empty(0, np.int64), *engine.store.keys()]))
        trace.rows = np.empty((len(trace.keys), engine.widths[0]), engine.dtype)
        engine.store.read(trace.keys, trace.rows)
        trace.cache, trace.moved = len(engine.caches[0]), asdict(engine.counters)
        embeddings.close()
        return trace

    def _in_plain_python(self, recipe: Recipe) -> Trace:
        reference = Reference(recipe.tables(), recipe.row_optimizer(), recipe.seed)
        embeddings = PlainEmbeddings(reference, recipe.pooled, torch_device(recipe.device))
        model, dense = recipe.model_over(embeddings)
        rates = recipe.rates(embeddings, dense)
        trace = Trace("reference")
        self._watch(
            trace,
            recipe,
            trace.record(Schema.of(reference.tables), model, dense, rates, recipe.stream(), reference.read),
        )
        trace.keys = np.array(sorted(reference.rows), np.int64)
        trace.rows = reference.read(trace.keys)
        return trace

    def _watch(self, trace: Trace, recipe: Recipe, done: Iterator[int]) -> None:
        title = f"{recipe.optimizer}, {trace.name}"
        to = sys.stderr if self.json else sys.stdout
        with Progress(title, steps=recipe.stream().steps, to=to, quiet=self.quiet) as progress:
            for number in done:
                progress(number, lambda: {"loss": f"{trace.losses[-1]:.4f}"})


class PlainEmbeddings(nn.Module):
    """The plain reference in the place of an EmbeddingBagCollection, or of an EmbeddingCollection: pooled=False.

    >>> import skirl
    >>> plain = PlainEmbeddings(Reference([skirl.Table("t", rows=10, dim=2)], skirl.SGD(lr=1.0)))
    >>> plain(skirl.KeyedJagged.one_hot(["t"], torch.tensor([[3], [4]]))).stacked().sum().backward()
    >>> sorted(plain.reference.rows)
    [3, 4]
    """

    def __init__(self, reference: Reference, pooled: bool = True, at: str | torch.device = "cpu") -> None:
        super().__init__()
        self.reference = reference
        self.tables = reference.tables
        self.pooled = pooled
        self.at = at
        self.anchor = torch.zeros((), device=at, requires_grad=True)  # so that backward comes here
        self.optimizer = TorchHandle(reference.optimizer, self.anchor)  # the learning rate of the next backward

    def forward(self, sparse: Sparse) -> "PlainRows":
        bags = _bags(sparse)
        if not self.pooled:  # each id a bag of its own
            bags = {name: (ids, range(len(ids) + 1), None) for name, (ids, _, _) in bags.items()}
        names = [name for table in self.tables for name in table.features]
        return PlainRows(zip(names, _Plain.apply(self.anchor, self, bags, names), strict=True))


class PlainRows(dict[str, Tensor]):
    """What the plain embeddings return: a tensor for each feature, by name."""

    def stacked(self) -> Tensor:
        """All features as one [batch, features, dim] tensor."""
        return torch.stack(list(self.values()), dim=1)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, plain: PlainEmbeddings, bags: dict[str, Bags], names: list[str]
    ) -> tuple[Tensor, ...]:
        ctx.plain, ctx.names = plain, names
        out = plain.reference.forward(bags)
        return tuple(torch.from_numpy(out[name]).to(plain.at) for name in names)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        named = {name: grad.cpu().numpy() for name, grad in zip(ctx.names, grads, strict=True)}
        ctx.plain.reference.backward(named, lr=ctx.plain.optimizer.lr)
        return None, None, None, None


def _bags(sparse: Sparse) -> dict[str, Bags]:
    """Ids, offsets and weights of each feature, as lists."""
    names, values, weights = sparse.keys(), sparse.values().tolist(), sparse.weights_or_none()
    offsets = sparse.offsets().tolist()
    batch = (len(offsets) - 1) // len(names)
    bags: dict[str, Bags] = {}
    for i, name in enumerate(names):
        ends = offsets[i * batch : (i + 1) * batch + 1]
        part = slice(ends[0], ends[-1])
        own = None if weights is None else weights[part].tolist()
        bags[name] = (values[part], [end - ends[0] for end in ends], own)
    return bags
