"""Import rows piece by piece from a state dict of nn.EmbeddingBag, a file of `skirl.export` or another checkpoint, which is
opened without the model that trained it. Reading a file cannot run code."""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode, loader_state
from skirl.checkpoint.export import FORMAT
from skirl.checkpoint.folder import numbers
from skirl.checkpoint.rows import OwnRows, rows_for
from skirl.checkpoint.saving import save
from skirl.checkpoint.votes import agreed, take_newest, told
from skirl.core import initial
from skirl.core.initial import Given
from skirl.core.keys import key_of, row_of, table_of
from skirl.core.optim import FTRL, ROW_OPTIMIZERS, row_optimizer
from skirl.core.tables import Table
from skirl.engine.access import PIECE, bank_of, peek, put_rows
from skirl.engine.device import HALVES
from skirl.engine.work import Counters
from skirl.nn.collection import (
    Collection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    TablePlace,
    collections_of,
    tables_of,
)
from skirl.peers.base import Alone, Peers
from skirl.peers.job import using
from skirl.tools.sealed_json import COUNT, TEXT, CheckpointError, misfit

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32)


def import_rows(
    model: nn.Module, source: str | Path | Mapping[str, Tensor], *, names: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Import the rows of every table that the source has. Return how many, by table.

    Do not call it while a lookahead iterates.

    A state dict has all rows of a table and cannot tell which were trained, so all of them are stored. The optimizer's
    state starts from its initial value, unless the source has that of the same optimizer, with the steps that Adam
    counts. Several trainers must all call this at once with the same source; each takes the rows that it owns.

    **Arguments**

    - `model`: the model, or the collection itself.
    - `source`: a state dict; a file of one (.safetensors, or what torch.save wrote); a file that `skirl.export` wrote;
      or a folder of checkpoints, from which only rows are taken.
    - `names`: the name of each table's weight in the source. Needed only if that is none of `weight`, `TABLE` and
      `TABLE.weight`, and does not end with `.TABLE.weight`.

    >>> import skirl
    >>> bag = torch.nn.EmbeddingBag(10, 2, mode="sum")
    >>> rows = skirl.EmbeddingBagCollection([skirl.Table("item", 10, 2)], optimizer=skirl.SGD(), cache=5)
    >>> import_rows(rows, bag.state_dict())
    {'item': 10}
    >>> ids = torch.tensor([[3], [9]])
    >>> torch.equal(rows.eval()(skirl.KeyedJagged.one_hot(["item"], ids))["item"], bag(ids))
    True
    """
    tables = tables_of(model)
    collections = collections_of(model).values()
    for collection in collections:
        collection.engine.check()
        if collection.lookahead is not None and collection.lookahead.iterating:
            raise RuntimeError("a lookahead is iterating over these embeddings: import before its loop, or after it")
        collection.current.finish()
    if isinstance(source, str | Path) and Path(source).is_dir():
        peers = next(iter(tables.values())).engine.rows.peers
        with opened(source, peers) as (rows, *_):
            each = told(peers, copy_rows(tables, tables_of(rows), Path(source)), "rows of a checkpoint taken")
        found = {name: sum(theirs[name] for theirs in each) for name in each[0]}
    else:
        found = _from_tensors(tables, Tensors(source), names or {})
    for collection in collections:
        collection.forget()
    return found


def read_rows(source: Path, out: Path, *, names: Sequence[str], optimizer: str | None, store: str) -> dict[str, Any]:
    """Make a checkpoint of the rows in a file. The arguments are the flags of `skirl import`."""
    if out.is_dir() and numbers(out):
        raise ValueError(f"{out} holds checkpoints: name another folder")
    tensors = Tensors(source)
    found = [n for n in sorted(tensors.names) if n.endswith("weight") and len(tensors.shape(n)) == 2]
    every = {n.removesuffix("weight").removesuffix(".") or tensors.alone or "table": n for n in found}
    weights: dict[str, str] = {}
    for table in names or every:
        if (name := _name(tensors, table, {} if names else every, len(names) == 1)) is None:
            raise ValueError(
                f"{source} has no table {table!r}, it has {', '.join([*every][:9])}: set table to some of these"
            )
        weights[table] = name
    if not weights:
        raise ValueError(f"{source} has no weight, it has {', '.join(sorted(tensors.names)[:9])}: name another file")
    counts, theirs = {table: tensors.shape(name)[0] for table, name in weights.items()}, set[str]()
    for table, name in weights.items():
        base = name.removesuffix("weight")
        if f"{base}ids" in tensors.names:  # it has only the touched rows
            if "rows" not in (facts := tensors.table(base)):
                raise ValueError(f"{source} has ids of {table!r}, but not the number of its rows: export it again")
            counts[table] = facts["rows"]
            theirs.add(facts["optimizer"])
    short = {make().name: short for short, make in ROW_OPTIMIZERS.items()}
    chosen = optimizer or (short.get(*theirs) if len(theirs) == 1 else None) or "rowwise-adagrad"
    tables = [Table(t, counts[t], tensors.shape(n)[1]) for t, n in weights.items()]
    rows = EmbeddingBagCollection(tables, optimizer=row_optimizer(chosen)(), cache=1, store=store)
    taken = import_rows(rows, source, names=weights)
    save(out, model=rows)
    rows.close()
    return {"tables": taken, "optimizer": chosen}


def _from_tensors(tables: Mapping[str, TablePlace], tensors: "Tensors", names: Mapping[str, str]) -> dict[str, int]:
    named = {n: _name(tensors, n, names, len(tables) == 1) for n, place in tables.items()}
    plan = [_planned(tensors, tables[n], name) for n, name in named.items() if name is not None]
    if not plan:
        raise ValueError(
            f"{tensors.where} has no table of this model: it has {', '.join(sorted(tensors.names)[:9])}; pass "
            "names={TABLE: NAME}"
        )
    for source in plan:  # any refusal by form has come before the first rows are taken
        _take(tensors, source)
        if source.steps is not None:
            source.place.pack.steps[source.place.number] = source.steps
    return {source.place.table.name: source.total for source in plan}


def copy_rows(tables: Mapping[str, TablePlace], theirs: Mapping[str, TablePlace], path: Path) -> dict[str, int]:
    """Copy the touched rows of all tables that both have, with their state if the optimizer is the same."""
    found: dict[str, int] = {}
    if not tables.keys() & theirs.keys():
        raise CheckpointError(f"{path} has no table of this model: it has {', '.join(sorted(theirs)[:9])}")
    for name in tables.keys() & theirs.keys():
        here, there = tables[name].table, theirs[name].table
        if (here.rows, here.dim) != (there.rows, there.dim):
            raise CheckpointError(
                f"table {name!r} is [{there.rows}, {there.dim}] in {path}, but [{here.rows}, {here.dim}] here: make it as "
                "large as it was"
            )
    for name, place in tables.items():
        if name not in theirs:
            continue
        source = theirs[name]
        same = source.optimizer.rule == place.optimizer.rule
        if place.optimizer.weight_follows_state:  # with other rates, the same state means other rows
            same = source.optimizer == place.optimizer
        found[name] = _copy(place, source, same)
        if same:  # Adam's moments are meaningless without it
            place.pack.steps[place.number] = source.pack.steps[source.number]
    return found


def _copy(place: TablePlace, source: TablePlace, same: bool) -> int:
    """Copy the touched rows of a table that this trainer owns, with their state if `same`. Return how many count here."""
    taken, bank, rows = 0, bank_of(source.engine, source.number), place.engine.rows
    for keys in source.engine.store.held():
        keys = np.sort(keys[table_of(keys) == source.number])
        keys = keys[rows.owns(key_of(place.number, row_of(keys)))]
        if keys.size:
            records = peek(source.engine, keys, bank, source.pack.number)
            state = {"all": records} if same else {"weight": records[:, : place.table.dim]}
            put_rows(place.engine, place.number, row_of(keys), state, place.pack.number)
            taken += keys.size * rows.counts(place.number)
    return taken


class Tensors:
    """Named tensors of a state dict or a file, which is mapped into memory and read in pieces."""

    def __init__(self, source: str | Path | Mapping[str, Tensor]) -> None:
        self.where = "the state dict" if isinstance(source, Mapping) else str(source)
        self.tables: dict[str, Any] = {}
        """By table, the rows, steps and optimizer that a file of `skirl.export` states; empty for other sources."""
        if isinstance(source, Mapping):
            state = dict(source)
        elif not Path(source).is_file():
            raise FileNotFoundError(f"{source} does not exist: name a file, or a folder of checkpoints")
        elif Path(source).suffix == ".safetensors":
            try:
                state = dict[str, Any](load_file(source))
                with safe_open(source, framework="pt") as file:
                    about = file.metadata() or {}
            except SafetensorError as error:
                raise ValueError(f"{source} is not a safetensors file ({error}): name another") from None
            if about.get("format") == FORMAT:
                self.tables = self._stated(about)
        else:
            state = _torch_state(source)
        self._tensors = {n: t for n, t in state.items() if isinstance(t, Tensor)}
        self.names = set(self._tensors)

    def _stated(self, about: Mapping[str, str]) -> dict[str, Any]:
        try:
            tables = json.loads(about.get("tables", "{}"))
            wrong = misfit(tables, {...: {"rows": COUNT, "steps": COUNT, "optimizer": TEXT}})
        except (ValueError, RecursionError) as error:
            tables, wrong = {}, str(error)
        if wrong is not None:
            raise ValueError(f"{self.where} does not say what its tables are ({wrong}): export it again")
        return tables

    @property
    def alone(self) -> str | None:
        """Name of the only table in a file of `skirl.export`, whose tensors then have no table's name. Otherwise None."""
        return next(iter(self.tables)) if len(self.tables) == 1 else None

    def table(self, base: str) -> dict[str, Any]:
        """Return what a file of `skirl.export` states of the table whose tensors begin with `base`."""
        return self.tables.get(base.removesuffix(".") or self.alone or "", {})

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def check(self, name: str, shape: tuple[int, ...], of: tuple[torch.dtype, ...], then: str) -> None:
        found, wanted = str(list(self.shape(name))), str(list(shape))
        if found == wanted:
            if (dtype := self._tensors[name].dtype) in of:
                return
            found, wanted, then = f"of {dtype}", f"of {of[0]}", "convert it"
        raise ValueError(f"{name} is {found} in {self.where}, and not {wanted}: {then}")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        part = self._tensors[name][start:stop].detach().cpu()
        return (part.to(torch.float32) if part.dtype in (torch.bfloat16, torch.float16) else part).numpy()


def _torch_state(source: str | Path) -> dict[str, Any]:
    try:
        _refuse_damaged(source)
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # of any class, with a text of any length
        why = str(error).partition("\n")[0].partition(". ")[0][:200]
        raise ValueError(
            f"{source} is not a state dict that torch.load(weights_only=True) can read ({why}): name a file that "
            "torch.save(model.state_dict()) or skirl export wrote, or a .safetensors"
        ) from None
    inside = (
        [state.get(name) for name in ("state_dict", "model", "model_state_dict")] if isinstance(state, dict) else []
    )
    return next((one for one in [*inside, state] if isinstance(one, dict)), {})


def _refuse_damaged(source: str | Path) -> None:
    """Verify the checksums in torch's file, which torch ignores when it maps the file into memory."""
    with zipfile.ZipFile(source) as file:
        for entry in file.infolist():
            if entry.CRC:  # 0 if torch was told to write none
                with file.open(entry) as part:
                    while part.read(1 << 20):
                        pass


def _name(tensors: Tensors, table: str, names: Mapping[str, str], alone: bool) -> str | None:
    if table in names:
        if names[table] not in tensors.names:
            has = ", ".join(sorted(tensors.names)[:9])
            raise ValueError(f"{tensors.where} has no {names[table]!r}: name one of {has}")
        return names[table]
    exact = [f"{table}.weight", table] + (["weight"] if alone or tensors.alone == table else [])
    ends = [name for name in sorted(tensors.names) if name.endswith(f".{table}.weight")]
    if len(ends) > 1:
        raise ValueError(
            f"{tensors.where} has {' and '.join(ends)} for {table!r}: say which by names={{{table!r}: NAME}}"
        )
    return next((name for name in [*exact, *ends] if name in tensors.names), None)


class _Planned(NamedTuple):
    place: TablePlace
    total: int
    parts: dict[str, str]
    """The tensors of `weight`, and of parts of the optimizer's state if it is that of this optimizer."""
    ids: str | None
    """None: all rows."""
    steps: int | None
    """Number of updates that the table had. None: keep the model's count."""


def _planned(tensors: Tensors, place: TablePlace, name: str) -> _Planned:
    """Check the tensors of a table. Raise if they do not fit it, or would mean something else in this model."""
    table, rule = place.table, place.optimizer
    as_large = f"make table {table.name!r} as large, or name the tensor that is meant by names={{TABLE: NAME}}"
    base = name.removesuffix("weight")
    if not name.endswith("weight") or f"{base}ids" not in tensors.names:
        tensors.check(name, (table.rows, table.dim), _FLOATS, as_large)
        return _Planned(place, table.rows, {"weight": name}, None, 0)  # every row is replaced, with its initial state
    n = (tensors.shape(name) or (0,))[0]
    tensors.check(f"{base}ids", (n,), _WHOLE, f"make it the rows of {name}")
    tensors.check(name, (n, table.dim), _FLOATS, as_large)
    stated = tensors.table(base)
    parts = {part: at.stop - at.start for part, at in rule.unpack(table.dim).items() if part != "weight"}
    state = {part: base + part for part in parts}
    if stated.get("optimizer", rule.name) != rule.name or not tensors.names.issuperset(state.values()):
        return _Planned(place, n, {"weight": name}, f"{base}ids", None)
    for part, width in parts.items():
        tensors.check(state[part], (n, width), _FLOATS, f"leave it out, or set an optimizer other than {rule.name}")
    steps = stated.get("steps")
    if steps is None and rule.counts_steps:
        raise ValueError(
            f"{tensors.where} has {rule.name}'s state of table {table.name!r}, but not its number of steps: export it "
            f"again, name the file itself, or leave {', '.join(state.values())} out"
        )
    return _Planned(place, n, {"weight": name, **state}, f"{base}ids", steps)


def _take(tensors: Tensors, source: _Planned) -> None:
    table, rule = source.place.table, source.place.optimizer
    for start in range(0, source.total, PIECE):
        stop = min(source.total, start + PIECE)
        values = {part: tensors.rows(name, start, stop) for part, name in source.parts.items()}
        rows = np.arange(start, stop)
        if source.ids is not None:
            rows = tensors.rows(source.ids, start, stop).astype(np.int64)
            if rows.size and not (rows.min() >= 0 and rows.max() < table.rows):
                raise ValueError(
                    f"{source.ids} in {tensors.where} has rows that table {table.name!r} does not have: make the table as "
                    "large"
                )
        if isinstance(rule, FTRL) and "z" in values and not rule.follows(values["weight"], values["z"], values["n"]):
            raise ValueError(
                f"{tensors.where} has rows of table {table.name!r} that do not follow from their state with {rule}: set "
                "its lr, beta, l1 and l2 to those of the run, or leave the state out"
            )
        put_rows(source.place.engine, source.place.number, rows, values, source.place.pack.number)


_INITIAL = {kind.__name__: kind for kind in (initial.Uniform, initial.Normal, initial.Constant)}
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, *HALVES)}
_KINDS = {kind.__name__: kind for kind in (EmbeddingBagCollection, EmbeddingCollection)}


class Opened(NamedTuple):
    rows: nn.Module
    dense: dict[str, torch.Tensor]
    data: Any
    header: Path


@contextmanager
def opened(path: str | Path, peers: Peers | None = None) -> Iterator[Opened]:
    """Open embeddings with all rows of the newest undamaged checkpoint, and its other content, for the length of a block.
    Files of rows are hard-linked into a temporary folder next to the checkpoint."""
    peers = peers or Alone()

    with ExitStack() as stack:  # closes also what was opened of one that is damaged for another trainer

        def take(header: Path, _: str) -> Opened:
            found = _open(header)
            for collection in collections_of(found.rows).values():
                stack.callback(collection.engine.store.close)
            return found

        yield take_newest(Path(path), peers, lambda *of: agreed(peers, lambda: take(*of), "another run's rows"))[1]


def _open(header: Path) -> Opened:
    body = folder.read(header)
    tensors = codec.read_dense(header.parent, body["dense"])
    rows_of = rows_for(body, Alone(), {})
    collections = [
        _rows_of(header, about, rows_of[name], body["run"]["rows"][name]["table_steps"])
        for name, about in body["definition"].items()
    ]
    data = loader_state(decode(body["run"]["data"], tensors))
    rows = collections[0] if len(collections) == 1 else nn.ModuleList(collections)
    prefix = "model.state."
    return Opened(rows, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, data, header)


def _rows_of(header: Path, definition: dict[str, Any], rows: OwnRows, steps: list[int]) -> Collection:
    files = header.parent / folder.ROWS
    rows.check(files)
    kind = _KINDS[definition["collection"]]
    with using(Alone()):  # only this process reads the rows of these embeddings
        collection = kind(**_arguments(definition), cache=1, store="checkpoint")
    engine = collection.engine
    engine.restore(lambda: rows.thaw(engine, files), table_steps=steps, counters=Counters())
    return collection


def _arguments(definition: dict[str, Any]) -> dict[str, Any]:
    def of(kind: Callable[[str], Any], fields: dict[str, Any]) -> Any:
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return kind(fields.pop("type"))(**fields)

    tables, optimizers = [], {}
    for fields in definition["tables"]:
        of_table = {name: value for name, value in fields.items() if name not in ("optimizer", "pattern", "frozen")}
        absent = partial(Given.absent, fields["rows"], fields["dim"])  # an array is known only by its digest
        kinds = _INITIAL | {"Given": absent}
        of_table |= {"features": tuple(fields["features"]), "init": of(kinds.__getitem__, fields["init"])}
        tables.append(Table(**of_table))
        optimizers[escape(fields["name"])] = of(row_optimizer, fields["optimizer"])
    dtype = _DTYPES[definition["dtype"]]
    return {"tables": tables, "optimizer": optimizers, "seed": definition["seed"], "dtype": dtype}
