"""A variant in its sweep: its rows, model, optimizer and random generator, and whose turn it is."""

import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skirl.checkpoint.rows import OwnRows
from skirl.core.batch import Sparse
from skirl.core.groups import RowOptimizers
from skirl.core.keys import table_of
from skirl.core.optim import RowOptimizer, RowwiseAdagrad
from skirl.core.tables import Table
from skirl.engine.access import put_records
from skirl.engine.engine import Engine
from skirl.engine.packs import Pack
from skirl.engine.work import Counters
from skirl.nn.collection import Collection, EmbeddingBagCollection, EmbeddingCollection
from skirl.nn.optimizers import Anchor, DenseGradients
from skirl.nn.output import Output, looked_up
from skirl.store import Record, Store, inside, open_store, shards
from skirl.store.base import Layout
from skirl.sweep.variants import Variant, check_store
from skirl.tools.rng_state import of_torch, put_torch, unchanged


def packs_of(
    variants: Sequence[Variant], tables: Sequence[Table], optimizer: RowOptimizers | None, seed: int
) -> list[Pack]:
    """Return the rows of all variants. Raise if two have one name, or if one could not be trained by the sweep's plan."""
    names, packs = [variant.name for variant in variants], list[Pack]()
    if not names:
        raise ValueError("a sweep has no variants: give it at least one skirl.Variant")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two variants are called {twice!r}: give each another name")
    for variant in variants:
        try:
            packs.append(_pack_of(variant, tables, optimizer, seed))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"variant {variant.name!r}: {error}") from error
    return packs


def _pack_of(variant: Variant, tables: Sequence[Table], optimizer: RowOptimizers | None, seed: int) -> Pack:
    over = variant.overrides
    own, dim, lr, rule = over.get("tables", tables), over.get("dim"), over.get("lr"), over.get("optimizer", optimizer)
    if [*map(_planned, own)] != [*map(_planned, tables)]:
        raise ValueError(
            "its tables differ from those of the sweep in more than dim and init, and all variants have one plan: run a "
            "sweep of its own for other names, rows, features or pooling"
        )
    if dim is not None:
        own = [replace(table, dim=dim) for table in own]
    rule = RowwiseAdagrad() if rule is None else rule
    if lr is not None and isinstance(rule, RowOptimizer):
        rule = replace(rule, lr=lr)
    elif lr is not None and isinstance(rule, Mapping):
        rule = {pattern: replace(each, lr=lr) for pattern, each in rule.items()}
    return Pack(own, rule, int(over.get("seed", seed)), variant.name)


def _planned(table: Table) -> tuple[object, ...]:
    return table.name, table.rows, table.features, table.pooling


class Folders:
    """Opens the store of a sweep, and another one whenever a variant has left: on disk, in the next folder sweep-N."""

    def __init__(self, spec: str, *, resume: bool) -> None:
        check_store(spec)
        self._spec, self._number = spec, 0
        self._disks = [Path(one.removeprefix("disk:")) for one, _ in shards(spec) if one.startswith("disk:")]
        there = [path for folder in self._disks for path in folder.glob("sweep-*") if path.name[6:].isdecimal()]
        if resume:  # the rows come from the checkpoint
            for path in there:
                shutil.rmtree(path)
        elif later := [path for path in there if path.name != "sweep-0"]:
            raise ValueError(
                f"{later[0]} already holds rows of a sweep: go on with it by --resume and --save, or set store to an empty "
                "folder"
            )

    def __call__(self, records: Mapping[int, Record], rows: Mapping[int, int]) -> Store:
        for folder in self._disks if self._number > 1 else ():  # rows move to this store from the one before
            shutil.rmtree(folder / f"sweep-{self._number - 2}")
        store = open_store(inside(self._spec, f"sweep-{self._number}"), records, rows=rows)
        self._number += 1
        return store


Loss = Callable[[Any, Any], "Tensor | tuple[Tensor, Any]"]


class OfVariant(Collection):
    """The embeddings of one variant: its own columns of the sweep's records, which move by one plan."""

    of_sweep = True

    def __init__(self, engine: Engine, pack: Pack) -> None:
        nn.Module.__init__(self)
        self.in_turn = False
        self._hold(engine, pack)

    def forward(self, sparse: Sparse) -> Output:
        """Look up the ids of a batch. In training mode, this is allowed only in the variant's turn."""
        if self.training and torch.is_grad_enabled() and (not self.in_turn or self.current.loop is None):
            raise RuntimeError(
                f"variant {self.pack.name!r} is trained outside of its turn: train it in `for variant in sweep`, inside a "
                "loop over `skirl.lookahead(loader, sweep)`, or call sweep.step(batch)"
            )
        return super().forward(sparse)

    def look_up(self, batch: Any, *, checked: bool = False) -> Output:
        """Return the rows' outputs of the batch in the loop, for what trains them by their gradients. checked: another
        variant has just checked its ids."""
        if checked:
            self.current.out = self._output(self.current.enter(), looked_up)
            return self.current.out
        with torch.enable_grad():
            return super().forward(self.current.loop.sparse(batch))

    def close(self) -> None:
        raise RuntimeError(f"the rows of variant {self.pack.name!r} are the sweep's: call sweep.close()")

    def restore(self, rows: OwnRows, files: Path, *, table_steps: Sequence[int], counters: Counters) -> None:
        """Take this variant's columns of all rows. The sweep has dropped the rows from before."""
        engine, pack = self.engine, self.pack
        widths = {t: pack.held[b] for b, bank in enumerate(pack.schema.banks) for t in bank.tables}
        layout = Layout({table: Record(width, engine.dtype.name) for table, width in widths.items()})
        for keys, records in rows.each(layout, files):
            for bank, members in enumerate(pack.schema.banks):
                here = np.isin(table_of(keys), members.tables)
                if here.any():
                    put_records(engine, keys[here], records[here], bank, pack.number)
        pack.steps[:] = table_steps
        engine.counters = counters

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Accept what a checkpoint says of its store: the rows come into that of the sweep."""

    def opened(self, loop: Any) -> None:
        """Refuse a lookahead over one variant, which would move its rows by another plan."""
        raise RuntimeError(
            f"variant {self.pack.name!r} has the plan of its sweep: pass the sweep to skirl.lookahead(loader, sweep)"
        )


class VariantBags(OfVariant, EmbeddingBagCollection): ...


class VariantRows(OfVariant, EmbeddingCollection): ...


class Contender:
    """A variant as its sweep yields it."""

    def __init__(self, variant: Variant, embeddings: OfVariant, seed: int) -> None:
        self.name = variant.name
        self.overrides = variant.overrides
        self.embeddings = embeddings
        self._model: Any = embeddings
        self.dense: torch.optim.Optimizer | None = None
        """The optimizer of the dense weights; None if the model has none to train."""
        self.parts: list[Any] = []
        """What its checkpoint has besides the model: the optimizer, and what is appended."""
        self.loss: float | None = None
        self.kept: Any = None
        """What the sweep's `loss` function returned besides the loss."""
        self.left: str | None = None
        """Why it left the race; None if it is still in it."""
        self.left_at = 0
        self.stepped = False
        """True once it has been trained on the batch in the loop."""
        self.ends_step = True
        """True if that batch is the last micro-batch of its step."""
        self.exact = True
        """False once a step may have had other bits than its lone run."""
        with unchanged():
            torch.manual_seed(seed)
            self.generator = of_torch()

    @property
    def model(self) -> Any:
        if self.left is not None:
            raise RuntimeError(f"variant {self.name!r} has left the sweep ({self.left}), and its model is let go")
        return self._model

    def make(self, make_model: Callable[["Contender"], Any]) -> None:
        """Make its model and its torch optimizer."""
        try:
            with self.turn():
                made = make_model(self)
        except Exception as error:
            error.add_note(f"make_model was called for variant {self.name!r}")
            raise
        model, *given = made if isinstance(made, tuple) else (made,)
        wrong = [one for one in given if one is not None and not isinstance(one, torch.optim.Optimizer)]
        if not isinstance(model, nn.Module) or len(given) > 1 or wrong:
            found = f"{type(model).__name__} with a {type(wrong[0]).__name__}" if wrong else type(made).__name__
            raise TypeError(
                f"make_model gave a {found} for variant {self.name!r}: return a torch.nn.Module over variant.embeddings, "
                "or that and its torch.optim.Optimizer"
            )
        collections = [module for module in model.modules() if isinstance(module, Collection)]
        if any(module is not self.embeddings for module in collections) or not collections:
            raise ValueError(
                f"the model of variant {self.name!r} has {'other' if collections else 'no'} embeddings: make it over "
                "variant.embeddings, and over these alone"
            )
        weights = [weight for weight in model.parameters() if not isinstance(weight, Anchor)]
        if not given and weights:
            given = [torch.optim.Adam(weights)]
        self._model, self.dense = model, next(iter(given), None)
        self.parts = [] if self.dense is None else [self.dense]
        self.embeddings.current.dense.of = [] if self.dense is None else [self.dense]

    def leave(self, why: str, step: int) -> None:
        self.left, self.left_at = why, step
        self._model = self.dense = self.kept = None
        self.parts = []
        self.embeddings.current.dense = DenseGradients()  # the old one holds the weights

    @property
    def diverged(self) -> bool:
        return self.loss is not None and not math.isfinite(self.loss)

    def keep(self, found: "Tensor | tuple[Tensor, Any]") -> Tensor:
        """Return its loss, out of what the loss function returned, and keep what else that is."""
        value, self.kept = found if isinstance(found, tuple) else (found, None)
        return value

    def train(self, loss: Loss, batch: Any) -> None:
        value = self.keep(loss(self.model, batch))
        value.backward()
        self.step(value)

    def step(self, loss: Tensor) -> None:
        """Step the dense optimizer after backward, which has already updated the rows."""
        if not self.embeddings.in_turn:
            raise RuntimeError(
                f"variant {self.name!r} is stepped outside of its turn: call its step in `for variant in sweep`"
            )
        self.trained(loss)
        step_dense([self])

    def trained(self, loss: Tensor) -> None:
        """Take note that its rows are trained and its dense gradients are there."""
        if self.stepped:
            raise RuntimeError(
                f"variant {self.name!r} is stepped twice on one batch: each variant trains once on each batch"
            )
        self.stepped = True
        self.loss = float(loss.detach())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it train and draw in this block: torch's random generators have its own states."""
        if self.embeddings.in_turn:
            yield
            return
        others, self.embeddings.in_turn = of_torch(), True
        put_torch(self.generator)
        try:
            yield
        finally:
            self.embeddings.in_turn = False
            self.generator = of_torch()
            put_torch(others)


ALIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers that train each weight by itself. Several step as one that has the groups of all, for the price of one call."""


def step_dense(contenders: Sequence[Contender]) -> None:
    """Step the dense optimizers of variants whose batch ends a step, and clear their gradients."""
    kinds = dict[Any, list[torch.optim.Optimizer]]()
    for one in [one for one in contenders if one.dense is not None and one.ends_step]:
        dense: Any = one.dense
        # What somebody has put around its own step is to be called.
        own = dense._optimizer_step_pre_hooks or dense._optimizer_step_post_hooks or "step" in vars(dense)
        if type(dense) in ALIKE and not own:
            kinds.setdefault(type(dense), []).append(dense)
            continue
        with one.turn():  # it may draw noise
            dense.step()
        dense.zero_grad()
    for kind, each in kinds.items():
        whole, states = _whole_of(kind), {weight: of for one in each for weight, of in one.state.items()}
        whole.param_groups = [group for one in each for group in one.param_groups]
        whole.state = defaultdict(dict, states)
        whole.step()
        whole.zero_grad()
        if len(whole.state) > len(states):  # in its first step, an optimizer makes the states of its weights
            for one in each:
                for weight in [weight for group in one.param_groups for weight in group["params"]]:
                    one.state[weight] = whole.state[weight]
        whole.param_groups, whole.state = [], defaultdict(dict)  # it lets go of all weights


@cache
def _whole_of(kind: Any) -> torch.optim.Optimizer:
    return kind([torch.zeros(())])


def check_apart(contenders: Sequence[Contender]) -> None:
    """Raise if models share a module, a weight or an optimizer: training one variant would then change another."""
    owners: dict[int, str] = {}
    for contender in contenders:
        model, dense = contender.model, contender.dense
        floats = [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
        places = {tensor.untyped_storage().data_ptr(): "weights" for tensor in floats if tensor.numel()}
        places |= {id(model): "module"} | ({} if dense is None else {id(dense): "optimizer"})
        for place, what in places.items():
            other = owners.setdefault(place, contender.name)
            if other != contender.name:
                raise ValueError(
                    f"make_model gave variants {other!r} and {contender.name!r} the same {what}: make new ones in each call"
                )
