"""The modules that a model holds. They look up the rows of the current Step, and their backward trains the rows."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Sparse
from skirl.core.groups import RowOptimizers, TorchHandle, matching
from skirl.core.ids import BadIds, Ids
from skirl.core.optim import RowOptimizer
from skirl.core.tables import Pooling, Table
from skirl.engine.access import RowIds, replacement, weights_of, weights_of_all
from skirl.engine.capacity import CacheSize
from skirl.engine.engine import Engine
from skirl.engine.packs import Pack
from skirl.engine.work import Counters, State
from skirl.nn.current_step import OTHER_WEIGHTS, CurrentStep, StepByStep, Ticket
from skirl.nn.optimizers import Anchor
from skirl.nn.output import Lookup, Output, shaped, uncompiled
from skirl.store import Store
from skirl.tools.hash_index import distinct


class Collection(nn.Module):
    optimizer: TorchHandle
    """What torch's schedulers take for the row optimizers: a group of parameters for each table."""
    pooled = True
    of_sweep = False  # True for a variant of a sweep: its checkpoints say so
    frozen_rows: Any = None
    """What freezes a variant's rows together with those of others, for a checkpoint."""
    names_tables = True
    """True if the user named the tables, so that two tables of one name may be meant to be one."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: RowOptimizers,
        cache: CacheSize | None = None,
        store: str | Store = "memory",
        device: str | torch.device = "cpu",
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        resume: bool = False,
        grad_scaler: Any = None,
        placement: Mapping[str, int | Mapping[int, int]] | None = None,
    ) -> None:
        super().__init__()
        if cache is None:
            raise TypeError(
                "cache is missing: set it to how many rows may be on the device, as 1000, '10%' of the tables' rows or "
                "'4GiB'; skirl.size(loader, tables) says what your data needs"
            )
        pack = Pack(tables, optimizer, seed)
        options: Any = {"cache": cache, "store": store, "dtype": dtype, "resume": resume, "placement": placement}
        self._hold(Engine([pack], pooled=self.pooled, device=device, **options), pack, grad_scaler)

    def _hold(self, engine: Engine, pack: Pack, grad_scaler: Any = None) -> None:
        self.engine, self.pack = engine, pack
        nothing = torch.from_numpy(np.empty(0, self.engine.dtype)).to(self.engine.device.at)
        self.anchor = Anchor.of(nothing)
        self.optimizer = TorchHandle(self.pack.optimizers, self.engine.device.at)
        self.current = CurrentStep(self.engine, self.pack, self.optimizer, self.anchor, grad_scaler)
        self.alone = StepByStep(self.engine)
        self._looking = threading.Lock()

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.pack.tables

    @property
    def grad_scaler(self) -> Any:
        return self.current.grad_scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self.current.grad_scaler = scaler

    def freeze(self, *tables: str) -> None:
        """Stop training the rows of these tables from the next forward on. To freeze all, use `requires_grad_(False)`."""
        self._set_frozen(tables, True)

    def unfreeze(self, *tables: str) -> None:
        self._set_frozen(tables, False)

    def _set_frozen(self, patterns: Sequence[str], frozen: bool) -> None:
        if not patterns:
            raise ValueError(
                "no table given: name tables, or use requires_grad_(False) and requires_grad_(True) for all"
            )
        found = [matching(pattern, self.pack.optimizers.names) for pattern in patterns]
        for places in found:
            self.pack.frozen[places] = frozen

    @property
    def frozen(self) -> tuple[str, ...]:
        return tuple(
            table.name
            for table, frozen in zip(self.tables, self.pack.frozen, strict=True)
            if frozen or not self.anchor.requires_grad
        )

    def part(self, *features: str, pooled: Pooling | None = None) -> "Part":
        """Return some of the features as a module for use inside the model; the rows stay in this collection. Parts
        share tables: a step looks up the rows once, sums their gradients and updates the rows once. Pass each part the
        batch as it was yielded. `pooled`, for an `EmbeddingCollection`: "sum" or "mean" returns bags, [batch, dim];
        None, one row per id."""
        return Part(self, features, pooled)

    @property
    def lookahead(self) -> Any:
        """The lookahead over these embeddings, while it is open."""
        return self.current.loop

    @uncompiled
    def forward(self, sparse: Sparse) -> Output:
        """Look up the ids of one batch, of all features or only some, as often as a step needs."""
        self.engine.check()
        if not (self.training and torch.is_grad_enabled()):
            return self._peek(sparse)
        current, weights = self.current, sparse.weights_or_none()
        if weights is not None and weights.requires_grad:
            raise ValueError(OTHER_WEIGHTS)
        if current.loop is None:
            if not self.engine.rows.local:
                raise RuntimeError(
                    f"{self.engine.rows.peers.size} trainers share these rows, and each step takes all of them: train "
                    "inside `with skirl.lookahead(loader, model) as batches`, or call model.eval() to look rows up"
                )
            current.finish()
            current.expect(self.alone.step(self.engine.resolver.capture(sparse)), 0)
            micro = current.enter()
        else:
            micro = current.enter()
            current.same.check(sparse, micro)
        if current.out is None:
            current.out = self._output(micro, lambda tickets: Lookup.apply(self.anchor, tickets))
        else:
            current.out.check_frozen()
        return current.out.only(sparse.keys())

    def _output(self, micro: Ids, look_up: Callable[[list[Ticket]], Sequence[Tensor | None]]) -> Output:
        current = self.current
        assert current.work is not None
        current.work.state = State.FORWARD
        tickets = [Ticket(current, current.work, current.micro, bank) for bank in range(len(micro.banks))]
        both = look_up(tickets)
        return Output(self.pack.schema, cast(list[Tensor], [*both[::2]]), tickets, micro.banks, [*both[1::2]])

    def _peek(self, sparse: Sparse) -> Output:
        """Look up rows as the executed steps left them. Nothing changes, not even which rows are resident. Any thread may
        call it while no step is running."""
        if not self.engine.store.ready:
            raise RuntimeError("no checkpoint is loaded: call skirl.load(FOLDER, model=...) before rows are looked up")
        self.current.drain()
        engine, resolver, outputs, bags = self.engine, self.engine.resolver, list[Tensor](), list[Tensor | None]()
        with self._looking:
            ids = resolver.resolve(resolver.check(resolver.capture_part(sparse))).banks
            found = [distinct(part.keys()) for part in ids]
            rows = [weights_of_all(engine, keys, bank, self.pack.number) for bank, (keys, _) in enumerate(found)]
        for bank, (part, (_, place)) in enumerate(zip(ids, found, strict=True)):
            flat = engine.banks[bank].pool_rows(rows[bank], self.pack.schema.banks[bank].dim, part, place)
            out, shared = shaped(flat, part)
            outputs.append(out)
            bags.append(shared)
        return Output(self.pack.schema, outputs, None, ids, bags).only(sparse.keys())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}anchor"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **options: Any) -> None:
        if f"{prefix}_extra_state" not in state_dict and any(name.startswith(prefix) for name in state_dict):
            raise ValueError(
                "rows are not in a state dict: load them with skirl.load, or skirl.import_rows from torch's"
            )
        super()._load_from_state_dict({f"{prefix}anchor": self.anchor, **state_dict}, prefix, *args, **options)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what names the store, its moment and the step, for state_dict; the rows stay in the store."""
        store = self.engine.store
        return {"identity": store.identity, "generation": store.generation, "steps": self.engine.counters.steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Raise, for load_state_dict, unless the rows are those that the state was saved with."""
        if state != (here := self.get_extra_state()):
            raise RuntimeError(
                f"the state was saved with other rows: {state}, here {here}. Rows are not in a state_dict: save and load "
                "them together with skirl.save and skirl.load. To load the rest alone, leave the key that ends with "
                "'_extra_state' out and pass strict=False"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse `copy` and `pickle`: two modules over one cache would each move its rows by their own plan."""
        raise TypeError(
            "embeddings cannot be copied or pickled: their rows live in a cache and a store. Make new ones; rows go from "
            "one to the other by skirl.save and skirl.load"
        )

    def rows(self, table: str, ids: RowIds) -> Tensor:
        """Return the weights of rows by id, `[n, dim]`, as after the last `backward`. Nothing becomes resident. A row
        that was never used has its initial value. With several trainers, all must call this at once for the same table,
        each with the ids that it wants."""
        self.engine.check()
        self.current.drain()
        return weights_of(self.engine, table, ids, self.pack.number)

    def set_rows(
        self, table: str, ids: RowIds, values: np.ndarray | Tensor, *, state: Literal["keep", "reset"] = "keep"
    ) -> None:
        """Replace the weights of rows by `[n, dim]` values in their dtype. Refused while a lookahead iterates, since
        its rows are on their way. This ends a step that has had no backward yet; its backward is then refused. With
        several trainers, all must call this at once with the same ids and values."""
        self.engine.check()
        if self.lookahead is not None and self.lookahead.iterating:
            raise RuntimeError("a lookahead is iterating over these embeddings: set rows before its loop, or after it")
        replace = replacement(self.engine, table, ids, values, state, self.pack.number)
        self.current.finish()
        replace()
        self.forget()

    def extra_repr(self) -> str:
        engine, each = self.engine, zip(self.tables, self.pack.optimizers, strict=True)
        lines = [f"({table.name}): {table.rows:,} x {table.dim}, {rule}" for table, rule in each]
        last = f"cache={engine.capacity.cache!r}, store={engine.store!r}, device={str(engine.device.at)!r}"
        return "\n".join([*lines, last])

    def flush(self) -> None:
        self.engine.check()
        self.current.drain()
        self.engine.flush()

    def close(self) -> None:
        """Wait for a checkpoint that is being written, then flush and close the store."""
        if self.current.loop is not None:
            raise RuntimeError("a lookahead over these embeddings is open: leave its with-block first")
        if self.engine.saving is not None:
            self.engine.saving.wait()
        if not self.engine.store.closed:
            self.flush()
            self.engine.store.close()

    def restore(self, rows: Any, files: Path, *, table_steps: Sequence[int], counters: Counters) -> None:
        """Replace all rows with those of a checkpoint, an `OwnRows`."""
        self.engine.restore(lambda: rows.thaw(self.engine, files), table_steps=table_steps, counters=counters)

    def forget(self) -> None:
        """Drop the current step and the plan, since rows have been replaced."""
        self.current.work = None
        self.alone.forget()

    def opened(self, loop: Any) -> None:
        self.current.opened(loop)
        self.alone.forget()


class Part(nn.Module):
    """Some features of a collection, looked up in it; made by `collection.part`, which documents the arguments."""

    def __init__(self, of: Collection, features: Sequence[str], pooled: Pooling | None) -> None:
        super().__init__()
        everything = [name for table in of.tables for name in table.features]
        if not features or not {*features} <= {*everything}:
            given = ", ".join(map(repr, features)) or "no feature"
            raise ValueError(f"part() names {given}: name some of {', '.join(map(repr, everything))}")
        if pooled is not None and pooled not in get_args(Pooling):
            raise ValueError(
                f"pooled is {pooled!r}: set it to 'sum' or 'mean', or leave it out for one row for each id"
            )
        if pooled is not None and of.pooled:
            raise ValueError(
                f"pooled is {pooled!r}, and an EmbeddingBagCollection pools as its tables say: leave pooled out, or make "
                "one EmbeddingCollection, whose parts have bags or sequences"
            )
        self.of = of
        self.pooled = pooled
        self.features = tuple(name for name in everything if name in features)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of the part, each with only the part's features."""
        chosen = ((table, [name for name in table.features if name in self.features]) for table in self.of.tables)
        return tuple(replace(table, features=tuple(names)) for table, names in chosen if names)

    @uncompiled
    def forward(self, sparse: Sparse) -> Output:
        if missing := set(self.features) - set(sparse.keys()):
            have = ", ".join(map(repr, sparse.keys())) or "none"
            raise BadIds(
                f"the batch has no feature {sorted(missing)[0]!r}, which this part looks up, it has {have}: pass it the "
                "batch as it was yielded"
            )
        return self.of(sparse).only(self.features).pooling(self.pooled)

    def extra_repr(self) -> str:
        return ", ".join([*map(repr, self.features), *([] if self.pooled is None else [f"pooled={self.pooled!r}"])])


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """Return the collections of a model by module name, in the model's order. The name is "" for the model itself."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Collection)}
    if not found:
        raise ValueError(
            "the model has no skirl collection: give it a skirl.EmbeddingBagCollection or a skirl.EmbeddingCollection"
        )
    return found


def refuse_copies(model: nn.Module) -> None:
    """Refuse two collections with a table of the same name and shape: each would silently train its own rows."""
    found: dict[tuple[str, int, int], str] = {}
    for place, collection in collections_of(model).items():
        for table in collection.tables if collection.names_tables else ():
            other = found.setdefault((table.name, table.rows, table.dim), place)
            if other != place:
                raise ValueError(
                    f"two collections of the model, {other!r} and {place!r}, have a table {table.name!r} of {table.rows:,} "
                    f"rows and dim {table.dim}, and each would train rows of its own. To share them, make one "
                    "EmbeddingCollection with the features of both, and give each module a part of it: "
                    f'collection.part("{table.features[0]}", pooled="{table.pooling}"). To keep them apart, give one '
                    "another name"
                )


class TablePlace(NamedTuple):
    engine: Engine
    pack: Pack
    number: int

    @property
    def table(self) -> Table:
        return self.pack.tables[self.number]

    @property
    def optimizer(self) -> RowOptimizer:
        return self.pack.optimizers[self.number]


def tables_of(model: nn.Module) -> dict[str, TablePlace]:
    """Return the tables of all collections of a model, by name. Raise if two have the same name."""
    found: dict[str, TablePlace] = {}
    for collection in collections_of(model).values():
        for number, table in enumerate(collection.tables):
            if table.name in found:
                raise ValueError(
                    f"two collections of the model have a table {table.name!r}: pass one of the collections itself"
                )
            found[table.name] = TablePlace(collection.engine, collection.pack, number)
    return found


class EmbeddingBagCollection(Collection):
    """Pooled embeddings of any number of tables, whose rows live outside the device.

    >>> import skirl
    >>> embeddings = EmbeddingBagCollection(
    ...     [Table("user", rows=1000, dim=4), Table("item", rows=1000, dim=4, features=("clicked", "bought"))],
    ...     optimizer=skirl.RowwiseAdagrad(lr=0.02), cache="10%", store="memory", seed=0)
    >>> ids = skirl.KeyedJagged(["user", "clicked", "bought"], torch.tensor([7, 1, 2, 1]), lengths=torch.tensor([1, 2, 1]))
    >>> embeddings(ids)["clicked"].sum().backward()  # rows 1 and 2 of "item" are trained here
    >>> embeddings.engine.counters.new
    3

    **Arguments**

    - `tables`: the tables; those of one dim and one kind of row optimizer share a part of the cache.
    - `optimizer`: how rows are trained: a row optimizer, or one for each pattern of table names, such as `{"user_*":
      skirl.Adam(), "*": skirl.SGD()}`; the first pattern that matches counts. Rows are not Parameters:
      `clip_grad_norm_(model.parameters())` skips them; to bound the gradient of each row, set `clip` here.
    - `cache`: rows on the device: a number of rows, a share of all rows ("10%"), bytes with a unit ("4GiB"), or "auto":
      half of the free memory. The results are the same, bit for bit. `skirl size` shows what your data needs.
    - `store`: where all other rows are: "memory"; "disk:FOLDER"; "rpc://HOST:PORT", memory nodes; a list of these with
      weights, "disk:a,disk:b*2"; "checkpoint", the checkpoint that is loaded, read-only; or a `skirl.store.Store`.
    - `device`: what computes on the rows: "cpu", "cuda" or "cuda:N".
    - `seed`: fixes the rows' initial values. A store with rows refuses another.
    - `dtype`: dtype of the rows: float32, float64; on a GPU also bfloat16 or float16, rounded stochastically.
    - `resume`: continue with the rows that the store already has. By default, a store with rows is refused.
    - `grad_scaler`: the loop's `torch.amp.GradScaler`, if it has one.
    - `placement`: with several trainers, the one that has all rows of a table and looks its bags up for all, by the table's
      name, or trainers and how many of its columns each has, `{"item": {0: 32, 1: 32}}`; other tables' rows are spread by
      hash. No bit depends on it.
    """


class EmbeddingCollection(Collection):
    """Embeddings without pooling: one row for each id.

    >>> import skirl
    >>> embeddings = EmbeddingCollection([Table("item", 1000, 4)], optimizer=skirl.SGD(lr=0.1), cache=100)
    >>> ids = skirl.KeyedJagged(["item"], torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1]))
    >>> embeddings(ids)["item"].shape
    torch.Size([3, 4])

    The arguments are those of `EmbeddingBagCollection`.
    """

    pooled = False
