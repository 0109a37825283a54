"""Save and load everything that a run needs, so that it goes on with the bits of a run that never stopped.

    checkpoint/
      checkpoint.json                  what is saved, sealed; names the two below
      rows-MARK/                       the store's own snapshot: every row with its optimizer state
      tensors-MARK.safetensors         dense parameters and buffers, states of optimizers, random generators

Nothing is written over: each save has a mark of its own, the rename of checkpoint.json makes it the checkpoint, and the one
before it is removed afterwards. So a kill at any moment leaves one whole, for room for two on disk. Nothing is pickled, and
files are checked against their size and SHA-256 before anything changes.

The world stops meanwhile: 2 million rows of 65 floats (520 MB) took 1.4 s to save and 2.9 s to load, on one busy core and a
local disk. A background copy would hide this for twice the rows' memory.
"""

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from skirl import generators
from skirl.codec import decode, encode, with_metadata
from skirl.engine import Counters, Engine
from skirl.lookahead import Lookahead
from skirl.nn.modules import Collection, collection_of
from skirl.sealed import CheckpointError, read_sealed, skirl_version, to_disk, write_sealed

log = logging.getLogger("skirl")

HEADER = "checkpoint.json"
FORMAT = "skirl-checkpoint"
FORMAT_VERSION = 1
_OURS = re.compile(r"(rows-|tensors-|checkpoint\.json-)([0-9a-f]{16})(\.safetensors|\.tmp)?")


def save(path: str | Path, *, model: nn.Module, optimizers: Sequence[Any] = (), data: Any = None) -> None:
    """Save a run to a folder: rows, the model's other parameters, optimizers, random generators and place in the data.

    Call it after `dense.step()`, or outside the loop. optimizers: also schedulers, metrics or whatever else has
    `state_dict` and `load_state_dict`. data: the lookahead, or a loader with these methods. The folder may hold an older
    checkpoint: it is replaced at one moment, whole. One process at a time may save to a folder.

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
    collection = collection_of(model)
    engine = collection.engine
    engine.check()
    parts = _listed(optimizers)
    if collection.lookahead is not None:
        collection.lookahead.settle()
    else:
        collection.finish()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    run, tensors = encode(
        {
            "optimizers": [
                {"type": type(p).__name__, "parameters": _parameters(p, names), "state": p.state_dict()} for p in parts
            ],
            "rows": {
                "handle": collection.optimizer.state_dict(),
                "table_steps": engine.table_steps.tolist(),
                "split": engine.split,
            },
            "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            "counters": asdict(engine.counters),
            "data": None if data is None else data.state_dict(),
            "generators": generators.capture(),
        },
        "run",
    )
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: a checkpoint is a folder, name another")
    folder.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    try:
        collection.flush()
        engine.store.snapshot(folder / f"rows-{mark}")
        state = model.state_dict()  # after the snapshot: it names the generation
        coded, more = encode({"state": state, "metadata": getattr(state, "_metadata", None)}, "model")
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "skirl": skirl_version(),
            "torch": torch.__version__,
            "definition": definition(collection),
            "rows": {
                "folder": f"rows-{mark}",
                "identity": engine.store.identity,
                "generation": engine.store.generation,
                "count": len(engine.store),
            },
            "tensors": _write_tensors(folder / f"tensors-{mark}.safetensors", tensors | more),
            "model": coded,
            "run": run,
        }
        write_sealed(folder / HEADER, header, mark)
    except BaseException:
        if mark not in _named(folder):  # an interrupt may also come after the rename
            _remove(folder, lambda other: other == mark)
        raise
    _remove(folder, lambda other: other != mark)


def load(path: str | Path, *, model: nn.Module, optimizers: Sequence[Any] = (), data: Any = None) -> None:
    """Go on from a checkpoint: into a model, optimizers and a lookahead made as those of the run that saved it.

    Load before the loop: `with skirl.lookahead(...) as batches: skirl.load(..., data=batches)`, then iterate; a run over
    several passes goes on with `range(batches.epochs, n)`. `optimizers` and `data` may be left out to evaluate. The cache
    starts empty; its size, depth and prefetch may differ from the run that saved, and change no bit. A checkpoint that is
    damaged, or of other tables, is a `CheckpointError` and changes nothing.

    The example is that of `skirl.save`.
    """
    folder = Path(path)
    header = read_sealed(folder / HEADER, format=FORMAT, version=FORMAT_VERSION, what="checkpoint")
    collection = collection_of(model)
    engine = collection.engine
    engine.check_process()
    parts = _listed(optimizers)
    if collection.lookahead is not None and collection.lookahead.iterating:
        raise RuntimeError(
            "a lookahead is already iterating over these embeddings: load before its loop, or leave its with-block first"
        )
    try:
        _check_definition(header["definition"], definition(collection), folder / HEADER)
        tensors = _read_tensors(folder, header["tensors"])
        run, saved = decode(header["run"], tensors), decode(header["model"], tensors)
        rows = folder / header["rows"]["folder"]
        state = {name: run["rows"][name] for name in ("table_steps", "split")}
        counters = Counters(**run["counters"])
        _check_optimizers(run["optimizers"], parts, model)
        _check_model(saved["state"], model)
        _check_data(run["data"], data, engine)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / HEADER} lacks something ({error!r}): use another checkpoint") from error
    engine.restore(rows, counters=counters, **state)
    collection.forget()
    if [engine.store.identity, engine.store.generation] != [header["rows"]["identity"], header["rows"]["generation"]]:
        engine.damage = f"{rows} is not the snapshot that {folder / HEADER} was saved with: load another checkpoint"
        raise CheckpointError(engine.damage)
    collection.optimizer.load_state_dict(run["rows"]["handle"])
    model.load_state_dict(with_metadata(saved["state"], saved["metadata"]))
    for name, parameter in model.named_parameters():
        grad = run["grads"].get(name)
        parameter.grad = None if grad is None else grad.to(parameter.device)
    for part, known in zip(parts, run["optimizers"] if parts else [], strict=True):
        part.load_state_dict(known["state"])
    if data is not None:
        data.load_state_dict(run["data"])
    generators.restore(run["generators"])
    if header["torch"] != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", header["torch"], torch.__version__)


def definition(collection: Collection) -> dict[str, Any]:
    """What makes rows mean what they mean: the same for the run that saves and the one that loads."""
    engine = collection.engine
    optimizer = {"type": type(engine.optimizer).__name__} | asdict(engine.optimizer)
    del optimizer["lr"]  # it is state: the handle has it
    tables = [
        {
            "name": table.name,
            "rows": table.rows,
            "dim": table.dim,
            "features": table.features,
            "pooling": table.pooling,
            "init": {"type": type(table.initial).__name__} | asdict(table.initial),
        }
        for table in engine.schema.tables
    ]
    found = {
        "collection": type(collection).__name__,
        "seed": engine.seed,
        "dtype": engine.dtype.name,
        "optimizer": optimizer,
        "tables": tables,
    }
    return json.loads(json.dumps(found))


def _check_definition(saved: Any, here: Any, path: Path, where: str = "") -> None:
    """Name the first field that differs."""
    if isinstance(saved, dict) and isinstance(here, dict) and saved.keys() == here.keys():
        for key in here:
            _check_definition(saved[key], here[key], path, f"{where}.{key}" if where else key)
    elif isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here) and where == "tables":
        for i, table in enumerate(here):
            _check_definition(saved[i], table, path, f"table {table['name']!r}")
    elif where == "tables":
        names = [", ".join(repr(table["name"]) for table in tables) for tables in (saved, here)]
        raise CheckpointError(f"{path} has the tables {names[0]}, this model {names[1]}: make them as they were saved")
    elif saved != here:
        raise CheckpointError(
            f"{path} was saved with {where} = {saved!r}, here it is {here!r}: set it to what was saved"
        )


def _check_optimizers(saved: list[Any], parts: list[Any], model: nn.Module) -> None:
    if not parts:
        return
    if len(saved) != len(parts):
        types = ", ".join(entry["type"] for entry in saved) or "none"
        raise CheckpointError(f"{len(parts)} optimizers given, the checkpoint has {len(saved)} ({types}): pass these")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for i, (entry, part) in enumerate(zip(saved, parts, strict=True)):
        if entry["type"] != type(part).__name__:
            raise CheckpointError(
                f"optimizers[{i}] is of type {type(part).__name__}, it was {entry['type']}: pass them as they were saved"
            )
        if entry["parameters"] != _parameters(part, names):
            raise CheckpointError(
                f"optimizers[{i}] has parameters {_parameters(part, names)}, it had {entry['parameters']}: make it with "
                "the same parameters in the same order"
            )


def _check_model(saved: dict[str, Any], model: nn.Module) -> None:
    here = model.state_dict()
    if saved.keys() != here.keys():
        only = [sorted(saved.keys() - here.keys()), sorted(here.keys() - saved.keys())]
        raise CheckpointError(
            f"the checkpoint's model alone has {only[0]}, this model alone {only[1]}: make it as it was"
        )
    for name, value in here.items():
        if isinstance(value, torch.Tensor) and saved[name].shape != value.shape:
            raise CheckpointError(
                f"{name} is {list(saved[name].shape)} in the checkpoint, {list(value.shape)} here: make it as it was"
            )


def _check_data(saved: Any, data: Any, engine: Engine) -> None:
    if data is None:
        return
    if saved is None:
        raise CheckpointError("the checkpoint was saved without data: leave data out, or save with data=batches")
    if isinstance(data, Lookahead):
        if data.engine is not engine:
            raise CheckpointError("data is a lookahead over another model: pass the one over the model that is loaded")
        data.check_state(saved)


def _listed(optimizers: Sequence[Any]) -> list[Any]:
    if hasattr(optimizers, "state_dict"):
        raise TypeError(f"optimizers is one {type(optimizers).__name__}: pass a list of them, optimizers=[...]")
    for i, part in enumerate(parts := list(optimizers)):
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"optimizers[{i}] is a {type(part).__name__}: pass what has state_dict and load_state_dict")
    return parts


def _parameters(part: Any, names: dict[int, str]) -> list[list[str]] | None:
    """The parameters of an optimizer, by group and by name; None for what is no optimizer."""
    if not isinstance(part, torch.optim.Optimizer):
        return None
    return [[names.get(id(p), "?") for p in group["params"]] for group in part.param_groups]


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    save_file(tensors, path)
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        to_disk(file)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _read_tensors(folder: Path, entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / entry["file"]
    if path.parent != folder:
        raise CheckpointError(f"{folder / HEADER} names a file outside its folder: do not trust it")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise CheckpointError(f"{path} has {size:,} bytes, {entry['bytes']:,} were written: use another checkpoint")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{path} is damaged, its checksum differs: use another checkpoint")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file ({error}): use another checkpoint") from None


def _named(folder: Path) -> str:
    header = folder / HEADER
    return header.read_text() if header.exists() else ""


def _remove(folder: Path, unwanted: Any) -> None:
    """Remove what is ours: of an older checkpoint, of one cut short, or of the one that just failed."""
    for path in folder.iterdir():
        match = _OURS.fullmatch(path.name)
        if not match or not unwanted(match[2]):
            continue
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:  # the checkpoint is whole without this
            log.warning("could not remove %s, which is not needed any more: %s", path, error)
