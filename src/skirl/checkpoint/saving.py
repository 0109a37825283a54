"""A checkpoint being saved: its rows are frozen in the training loop, for milliseconds, and written by a thread."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import encode
from skirl.checkpoint.rows import freeze_all
from skirl.checkpoint.votes import agreed, told, trainers_of
from skirl.core.initial import Given, Initial
from skirl.engine.engine import Engine
from skirl.nn.collection import Collection, collections_of
from skirl.peers.base import PeerError, Peers
from skirl.store.base import Frozen
from skirl.tools import __version__, rng_state
from skirl.tools.interrupts import Hold
from skirl.tools.os_errors import ROOM, NotWritten, of_system, why
from skirl.tools.sealed_json import CheckpointError, put_whole, seal


class Saving:
    """A checkpoint that is being written. `skirl.save` makes and returns it.

    **Arguments**

    - `path`: the folder of checkpoints.
    - `number`: the number of this one, one above the last in the folder; 0 if this run has none there yet.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.folder = path
        self.number = number
        self.after: int | None = None
        """The checkpoint in this folder that the run resumed from, or saved last."""
        self.start: int | None = None
        """The start of the run that writes to this folder. None until it has resumed or saved there."""
        self.pause = 0.0
        """Seconds that training stood still."""
        self.seconds = 0.0
        """Seconds until it was on disk."""
        self.bytes = 0
        """Bytes written for this checkpoint, without those of files that it shares with the one before."""
        self.files: dict[str, Any] = {}
        """Rows as the header names them, by collection. The next checkpoint builds on them."""
        self.failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._told = False

    @property
    def path(self) -> Path:
        """Path of its header, which is written last."""
        return folder.header(self.folder, self.number)

    @property
    def done(self) -> bool:
        """True once it is on disk or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def given_up(self) -> "Saving":
        """Return what the next checkpoint follows if this one failed: the one before, without files, to write all rows."""
        before = Saving(self.folder, self.after or 0)
        before.start = self.start
        return before

    def claim(self) -> None:
        """Begin a start of the run, if it has none in this folder. Raise a Superseded if there is a newer one."""
        if self.start is None:
            self.start = folder.claim(self.folder)
        folder.check_start(self.folder, self.start)

    def run(self, write: Callable[[], None]) -> None:
        """Write in the background. `write` cleans up if it fails."""

        def guarded() -> None:
            try:
                with told_of(self.folder):
                    write()
            except BaseException as error:
                self.failure = error

        self._thread = threading.Thread(target=guarded, name="skirl checkpoint")
        self._thread.start()

    def wait(self) -> Self:
        """Wait until the checkpoint is on disk. If it could not be written, the first call raises the error."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(0.1)  # in short waits, so that Ctrl-C gets through
        if self.failure is not None and not self._told:
            self._told = True
            raise self.failure
        return self


def save(
    path: str | Path,
    *,
    model: nn.Module,
    optimizers: Sequence[Any] = (),
    data: Any = None,
    keep_last: int = 1,
    wait: bool = True,
) -> Saving:
    """Save a run to a folder: rows, the model's other parameters, optimizers, random generators and position in the data.

    Call it after `dense.step()`, or outside the loop. In a step of several shards, call it when `batches.ends_step` is
    true. Only one run at a time may save to a folder; all its trainers save at once, after the same step. If the disk is
    full or cannot be written to, an OSError says so, the previous checkpoint stays whole, and the next save works.

    **Arguments**

    - `path`: the folder of checkpoints; made if it is not there.
    - `model`: the model, with its embeddings.
    - `optimizers`: dense optimizers, schedulers, metrics and whatever else has `state_dict` and `load_state_dict`. None
      by default, since the rows' optimizer is part of the model.
    - `data`: the lookahead, or a loader with these two methods. None if there is neither: a resumed run
      starts its data from the beginning.
    - `keep_last`: how many checkpoints stay in the folder, the newest ones; 1 takes the least space.
    - `wait`: return only when the checkpoint is on disk. That is the default because a script may end right after a
      save. False returns as soon as training may go on. `Saving.wait` waits for the checkpoint, and so does the next save.

    >>> import tempfile, skirl
    >>> def made():
    ...     torch.manual_seed(0)
    ...     rows = skirl.EmbeddingBagCollection([skirl.Table("a", 100, 2)], optimizer=skirl.SGD(lr=0.1), cache=4)
    ...     model = torch.nn.ModuleDict({"rows": rows, "top": torch.nn.Linear(2, 1)})
    ...     return model, torch.optim.Adam(model.parameters())
    >>> def train(model, dense, batches, folder):
    ...     for ids in batches:
    ...         loss = model["top"](model["rows"](ids)["a"]).sum()
    ...         loss.backward()
    ...         dense.step(), dense.zero_grad()
    ...         if batches.step == 6:
    ...             skirl.save(folder, model=model, optimizers=[dense], data=batches)
    ...     return loss.item()
    >>> loader = [skirl.KeyedJagged.one_hot(["a"], torch.tensor([[i % 5]])) for i in range(10)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model, dense = made()
    ...     with skirl.lookahead(loader, model, sparse=lambda ids: ids) as batches:
    ...         whole = train(model, dense, batches, folder)
    ...     model, dense = made()  # in another process, another day
    ...     with skirl.lookahead(loader, model, sparse=lambda ids: ids) as batches:
    ...         skirl.load(folder, model=model, optimizers=[dense], data=batches)
    ...         resumed = train(model, dense, batches, folder)
    >>> resumed == whole
    True
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}: set it to 1 or more checkpoints")
    path = Path(path)
    with told_of(path):
        began = time.perf_counter()
        collections, peers = collections_of(model), trainers_of(model)
        engines = {name: collection.engine for name, collection in collections.items()}
        for engine in engines.values():
            engine.check()
        parts = listed(optimizers)
        before = settled(engines)
        for collection in collections.values():
            collection.current.settle()
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path} is a file: a checkpoint is a folder, name another")
        run, tensors = _run(model, collections, parts, data) if peers.rank == 0 else ({}, {})
        saving = Saving(path, 0)
        if before is not None and before.folder == path:
            saving.start, saving.after, saving.files = before.start, before.number or None, before.files
        part = {
            "counters": {name: asdict(engine.counters) for name, engine in engines.items()},
            "whole": {name: [*engine.rows.whole.items()] for name, engine in engines.items()},
        }
        writing = partial(_write, saving, peers, keep_last, part)
        frozen: Frozen | None = None
        try:
            (path / folder.ROWS).mkdir(parents=True, exist_ok=True)
            if peers.rank == 0:
                saving.claim()
            saving.number = max([0, *folder.numbers(path)]) + 1
            with Hold():
                try:
                    frozen = freeze_all(collections, path, saving.files)
                    body, more = _head(model, collections, run, peers.size) if peers.rank == 0 else ({}, {})
                    saving.run(partial(writing, frozen, body, tensors | more))
                except BaseException:
                    if frozen is not None:
                        frozen.release()
                    # Freezing cleared marks of rows that no file has, so the next checkpoint must not build on the last one.
                    remember(engines, saving.given_up())
                    raise
                remember(engines, saving)
        except Exception as error:
            if peers.size > 1:
                writing(error, {}, {})  # tells the others, and raises
            raise
        if wait:
            settled(engines)
        saving.pause = time.perf_counter() - began
        return saving


def _run(
    model: nn.Module, collections: Mapping[str, Collection], parts: list[Any], data: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    return encode(
        {
            "optimizers": [{**optimizer(part, model), "state": part.state_dict()} for part in parts],
            "rows": {
                name: {
                    "handle": collection.optimizer.state_dict(),
                    "table_steps": collection.pack.steps.tolist(),
                }
                for name, collection in collections.items()
            },
            "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            "data": None if data is None else data.state_dict(),
            "generators": rng_state.capture(),
        },
        "run",
    )


def _head(
    model: nn.Module, collections: Mapping[str, Collection], run: Any, trainers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    state = model.state_dict()  # it has the generation of rows
    coded, tensors = encode({"state": state, "metadata": getattr(state, "_metadata", None)}, "model")
    shards = run["data"].get("shards") if isinstance(run["data"], dict) else None
    body = {
        "format": folder.FORMAT,
        "format_version": folder.FORMAT_VERSION,
        "skirl": __version__,
        "torch": torch.__version__,
        "definition": {name: definition(collection) for name, collection in collections.items()},
        "model": coded,
        "run": run,
        "shards": shards if type(shards) is int else trainers,
        "of_sweep": any(collection.of_sweep for collection in collections.values()),
    }
    return body, tensors


def definition(collection: Collection) -> dict[str, Any]:
    engine, pack = collection.engine, collection.pack
    groups = pack.optimizers
    rules = [{"type": rule.name} | asdict(rule) for rule in groups]
    for rule, of in zip(rules, groups, strict=True):
        if not of.weight_follows_state:
            del rule["lr"]  # it is state, which the optimizer's handle keeps
    frozen = collection.frozen
    tables = [
        {
            **{name: getattr(table, name) for name in ("name", "rows", "dim", "features", "pooling")},
            "init": _init(table.initial),
            "optimizer": rules[t],
            "pattern": groups.all[groups.of[t]].name,
            "frozen": table.name in frozen,
        }
        for t, table in enumerate(pack.tables)
    ]
    found = {
        "collection": next(
            kind.__name__ for kind in type(collection).__mro__ if kind.__module__.startswith("skirl.nn")
        ),
        "seed": pack.seed,
        "dtype": str(engine.torch_dtype).removeprefix("torch."),
        "tables": tables,
    }
    return json.loads(json.dumps(found))


def _init(initial: Initial) -> dict[str, Any]:
    """Describe an initialiser, or an array by its digest, for which the first save or load reads the whole array."""
    facts = {"digest": initial.digest} if isinstance(initial, Given) else asdict(initial)
    return {"type": type(initial).__name__} | facts


def listed(optimizers: Sequence[Any]) -> list[Any]:
    if hasattr(optimizers, "state_dict"):
        raise TypeError(f"optimizers is one {type(optimizers).__name__}: pass a list of them, optimizers=[...]")
    for i, part in enumerate(parts := list(optimizers)):
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"optimizers[{i}] is a {type(part).__name__}: pass what has state_dict and load_state_dict")
    return parts


def optimizer(part: Any, model: nn.Module) -> dict[str, Any]:
    """Describe an optimizer, or what else has a state, by its class and the parameters of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = part.param_groups if isinstance(part, torch.optim.Optimizer) else []
    return {"type": type(part).__name__, "parameters": [[names.get(id(p), "?") for p in g["params"]] for g in groups]}


def _write(
    saving: Saving,
    peers: Peers,
    keep: int,
    part: Mapping[str, Any],
    frozen: Frozen | Exception,
    body: Mapping[str, Any],
    tensors: dict[str, Any],
) -> None:
    """Write this trainer's rows, vote, and have the first trainer commit. After an error, the checkpoint before stays.
    `part` has this trainer's counters and splits of caches; `frozen` its rows, or the error that kept it from freezing
    them; `body` and `tensors`, which only the first trainer has, what else the header says, and the dense part."""
    began, since = time.perf_counter(), folder.files_of_rows(saving.files)
    steps = {name: counters["steps"] for name, counters in part["counters"].items()}
    step = max(steps.values(), default=None)

    def rows_written() -> dict[str, Any]:
        with told_of(saving.folder):
            if isinstance(frozen, Exception):
                raise frozen
            return frozen.write()

    def committed() -> int:
        with told_of(saving.folder):
            return 0 if peers.rank else _commit(saving, {**body, "parts": parts}, tensors, keep)

    try:
        begun = told(peers, {"number": saving.number, "steps": steps}, "a checkpoint begins", step)
        saving.number = begun[0]["number"]
        if rank := next((rank for rank, of in enumerate(begun) if of["steps"] != begun[0]["steps"]), None):
            raise ValueError(
                f"rank 0 saves after {begun[0]['steps']} steps and rank {rank} after {begun[rank]['steps']}: call "
                "skirl.save on all trainers after the same step"
            )
        try:
            rows = agreed(peers, rows_written, "rows of a checkpoint are written", step)
            named = {name: {"store": of["store"], "cache": of["cache"]} for name, of in rows.items()}
            parts = told(peers, {**part, "rows": named}, "parts of a checkpoint", step)
            dense_bytes = agreed(peers, committed, "a checkpoint is committed", step)
        except Exception:
            # No rank writes here, and none begins the next checkpoint before the call below, so rank 0 may sweep.
            with suppress(OSError):  # the next save sweeps again
                if peers.rank == 0:
                    folder.sweep(saving.folder, saving.start)
            with suppress(PeerError):
                told(peers, None, "what a failed checkpoint wrote is removed", step)
            raise
    finally:
        if isinstance(frozen, Frozen):
            frozen.release()
    saving.bytes, saving.files = dense_bytes, rows
    with suppress(OSError):  # a hard link to a store's file counts as none
        stats = [(saving.folder / name).stat() for name in folder.files_of_rows(rows) - since]
        saving.bytes += sum(stat.st_size for stat in stats if stat.st_nlink == 1)
        saving.bytes += saving.path.stat().st_size if peers.rank == 0 else 0
    saving.seconds = time.perf_counter() - began


def _commit(saving: Saving, body: dict[str, Any], tensors: dict[str, Any], keep: int) -> int:
    """Write the dense part and the header, whose rename makes the checkpoint. Return the bytes of the dense part."""
    mark, path = secrets.token_hex(8), saving.folder
    entry = codec.write_dense(path, mark, tensors)
    body |= {"number": saving.number, "start": saving.start, "dense": entry}
    put_whole(saving.path, seal(body), mark, partial(folder.check_start, path, saving.start))
    folder.retain(path, saving.number, keep, saving.after, saving.start)
    return entry["bytes"]


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """If the system refuses something in this block, say that a folder got no new checkpoint, why, and what stays."""
    try:
        yield
    except Exception as error:
        found = of_system(error)
        if found is None or isinstance(error, NotWritten):
            raise
        stays = "there is none in it"
        with suppress(OSError):
            if there := folder.numbers(path):
                stays = f"checkpoint {there[-1]} in it stays whole"
            elif (path / folder.OF_SWEEP).is_file():
                stays = "the one before stays whole"
        then = "free some room" if found.errno in ROOM else "make it a folder that can be written to"
        text = f"{path} got no new checkpoint, {why(error)}; {stays}: {then}, and save again"
        raise NotWritten(text, found.errno) from error


def settled(engines: Mapping[str, Engine]) -> Saving | None:
    """Return the last checkpoint of these rows, once it is on disk. If it could not be written, raise its error once."""
    for saving in [engine.saving for engine in engines.values()]:
        if saving is None:
            continue
        try:
            saving.wait()
        finally:
            if saving.done and saving.failure is not None:
                remember(engines, saving.given_up())
    last = [engine.saving for engine in engines.values()]
    # If only some collections were part of it, the next checkpoint writes all rows.
    return last[0] if all(saving is last[0] for saving in last) else None


def claimed(engines: Mapping[str, Engine], path: Path, start: int | None) -> int:
    """Assign the next checkpoints in this folder to a start. Return the number of the one that was loaded there, or 0."""
    loaded = settled(engines)
    last = loaded if loaded is not None and loaded.folder == path else Saving(path, 0)
    last.start = start
    remember(engines, last)
    return last.number


def remember(engines: Mapping[str, Engine], saving: Saving | None) -> None:
    for engine in engines.values():
        engine.saving = saving
