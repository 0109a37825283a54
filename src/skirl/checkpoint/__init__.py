"""Save and load everything that a run needs, so that it goes on with the bits of a run that never stopped.

What a folder of checkpoints holds is drawn in `folder.py` and documented in docs/checkpoints.md. A checkpoint is rows with
their optimizer state, the dense part, optimizers, random generators and the place in the data; what the oracle knows of the
rows follows from these. Nothing is pickled, and files are checked against their size and SHA-256 before anything changes.

- Atomic: nothing is written over, and the rename of its header makes a checkpoint, so a kill at any moment leaves the one
  before whole.
- Incremental: rows that have not changed since the checkpoint before are in its files.
- In the background: training stands still while rows are frozen (`saving.py`), and goes on while they are written. The
  alternative, a copy of all rows, takes twice the memory and the time of the copy.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint import dense, folder, whole
from skirl.checkpoint.cached_rows import overlay
from skirl.checkpoint.codec import decode, encode, with_metadata
from skirl.checkpoint.definition import (
    check_data,
    check_definitions,
    check_model,
    check_optimizers,
    definition,
    listed,
    parameters,
)
from skirl.checkpoint.folder import FORMAT, FORMAT_VERSION, numbers
from skirl.checkpoint.saving import AllFrozen, Saving, write
from skirl.engine.engine import Counters, Engine
from skirl.nn.collection import Collection, collections_of
from skirl.store.base import DISK_ROWS
from skirl.tools import rng_state
from skirl.tools.interrupts import uninterrupted
from skirl.tools.sealed_json import CheckpointError, OtherVersion, skirl_version
from skirl.tools.shape_of import COUNT, NUMBER, Kind, misfit

__all__ = ["Saving", "load", "numbers", "save"]

log = logging.getLogger("skirl")

_RATE = Kind("a number", lambda v: NUMBER.fits(v) or (isinstance(v, torch.Tensor) and v.numel() == 1))
_ROWS = {
    "counters": {...: COUNT},
    "handle": {"param_groups": [{"lr": _RATE}]},
    "table_steps": [COUNT],
}


def save(
    path: str | Path,
    *,
    model: nn.Module,
    optimizers: Sequence[Any] = (),
    data: Any = None,
    keep: int = 1,
    wait: bool = True,
) -> Saving:
    """Save a run to a folder: rows, the model's other parameters, optimizers, random generators and place in the data.

    Call it after `dense.step()`, or outside the loop. optimizers: also schedulers, metrics or whatever else has
    `state_dict` and `load_state_dict`. data: the lookahead, or a loader with these methods. keep: checkpoints that stay in
    the folder, the newest ones. wait: False returns once training may go on; the checkpoint is then written in the
    background, `Saving.wait` says when it is there, and the next save waits for it. One process at a time may save to a
    folder.

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
    began = time.perf_counter()
    if keep < 1:
        raise ValueError(f"keep is {keep}: set it to 1 or more checkpoints")
    collections = collections_of(model)
    engines = {name: collection.engine for name, collection in collections.items()}
    for engine in engines.values():
        engine.check()
    parts = listed(optimizers)
    before = _settled(engines)
    for collection in collections.values():
        collection.current.settle()
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file: a checkpoint is a folder, name another")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    run, tensors = encode(
        {
            "optimizers": [
                {"type": type(p).__name__, "parameters": parameters(p, names), "state": p.state_dict()} for p in parts
            ],
            "rows": {
                name: {
                    "handle": collection.optimizer.state_dict(),
                    "table_steps": collection.engine.table_steps.tolist(),
                    "split": collection.engine.capacity.saved,
                    "counters": asdict(collection.engine.counters),
                }
                for name, collection in collections.items()
            },
            "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            "data": None if data is None else data.state_dict(),
            "generators": rng_state.capture(),
        },
        "run",
    )
    (path / folder.ROWS).mkdir(parents=True, exist_ok=True)
    saving = Saving(path, max([0, *numbers(path)]) + 1)
    with uninterrupted():
        taken: AllFrozen | None = None
        try:
            taken = frozen = AllFrozen(engines, path, before)
            state = model.state_dict()  # after rows are frozen: it names the generation
            coded, more = encode({"state": state, "metadata": getattr(state, "_metadata", None)}, "model")
            body = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "skirl": skirl_version(),
                "torch": torch.__version__,
                "definition": {name: definition(collection) for name, collection in collections.items()},
                "model": coded,
                "run": run,
            }
            if before is not None and before.path.parent == path:
                saving.after = before.number
            saving.run(lambda: write(saving, path, frozen, tensors | more, body, keep))
        except BaseException:
            if taken is not None:
                taken.release()
            # Freezing took marks off rows that no file has: the next checkpoint must not build on the one before.
            _remember(engines, None if before is None else before.bare())
            raise
        _remember(engines, saving)
    if wait:
        _settled(engines)
    saving.pause = time.perf_counter() - began
    return saving


def _settled(engines: Mapping[str, Engine]) -> Saving | None:
    """The last checkpoint of these rows, on disk; raises, once, what kept it from getting there."""
    last = [engine.saving for engine in engines.values()]
    for saving in last:
        if saving is None:
            continue
        try:
            saving.wait()
        except BaseException:
            if saving.done:
                _remember(engines, saving.given_up())
            raise
    return (
        last[0] if all(saving is last[0] for saving in last) else None
    )  # of a part of them alone: all is written anew


def _remember(engines: Mapping[str, Engine], saving: Saving | None) -> None:
    for engine in engines.values():
        engine.saving = saving


def load(path: str | Path, *, model: nn.Module, optimizers: Sequence[Any] = (), data: Any = None) -> None:
    """Go on from a checkpoint: into a model, optimizers and a lookahead made as those of the run that saved it.

    Load before the loop: `with skirl.lookahead(...) as batches: skirl.load(..., data=batches)`, then iterate; a run over
    several passes goes on with `range(batches.epochs, n)`. `optimizers` and `data` may be left out to evaluate. The cache
    starts empty; its size, depth and prefetch may differ from the run that saved, and change no bit.

    path: the folder, or the header of one of its checkpoints. Of a folder it is the newest checkpoint that is whole: one
    that is damaged is named in a warning, and the one before it is used. Where none is left, or the checkpoint is of other
    tables, a `CheckpointError` says so and nothing has changed.

    The example is that of `skirl.save`.
    """
    collections = collections_of(model)
    engines = {name: collection.engine for name, collection in collections.items()}
    for collection in collections.values():
        collection.engine.check_process()
        if collection.lookahead is not None and collection.lookahead.iterating:
            raise RuntimeError(
                "a lookahead is already iterating over these embeddings: load before its loop, or leave its with-block "
                "first"
            )
    parts = listed(optimizers)
    _settled(engines)
    candidates = folder.headers(Path(path))
    first: CheckpointError | None = None
    changed: Path | None = None
    for header in candidates:
        try:
            body, run, saved = _read(header, model, collections, parts, data)
            for name, engine in engines.items():
                _restore_rows(header, body["rows"][name], run["rows"][name], engine)
                changed = header
        except OtherVersion:
            raise
        except CheckpointError as found:
            error = folder.naming(header, found)
            if isinstance(error, _Mismatch):
                raise error from None
            first = first or error
            if header != candidates[-1]:
                log.warning("%s. Going on from the checkpoint before it", error)
            continue
        break
    else:
        assert first is not None
        for engine in engines.values() if changed else ():
            engine.lose(f"{changed} could be read in part only: the rows of some collections are its own")
        raise first
    for collection in collections.values():
        collection.forget()
    try:
        _apply(run, saved, model, collections, parts, data)
    except Exception as error:  # a header that somebody has written: its checksum is right, and it is none of ours
        wrong = f"{header} is not what skirl.save writes ({error!r}): load another checkpoint"
        for engine in engines.values():
            engine.damage = wrong
        raise CheckpointError(wrong) from error
    last = Saving(header.parent, folder.number_of(header))
    last.files = {name: rows for name, rows in body["rows"].items() if rows["store"]["kind"] != DISK_ROWS}
    _remember(engines, last)
    if body["torch"] != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", body["torch"], torch.__version__)


def _apply(
    run: dict[str, Any],
    saved: dict[str, Any],
    model: nn.Module,
    collections: Mapping[str, Collection],
    parts: list[Any],
    data: Any,
) -> None:
    """All but the rows."""
    for name, collection in collections.items():
        collection.optimizer.load_state_dict(run["rows"][name]["handle"])
    model.load_state_dict(with_metadata(saved["state"], saved["metadata"]))
    for name, parameter in model.named_parameters():
        grad = run["grads"].get(name)
        parameter.grad = None if grad is None else grad.to(parameter.device)
    for part, known in zip(parts, run["optimizers"] if parts else [], strict=True):
        part.load_state_dict(known["state"])
    if data is not None:
        data.load_state_dict(run["data"])
    rng_state.restore(run["generators"])


class _Mismatch(CheckpointError):
    """The checkpoint is whole, and of something else: an older one would be, too."""


def _read(
    header: Path, model: nn.Module, collections: Mapping[str, Collection], parts: list[Any], data: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A checkpoint's header, its run and its model, all files seen to be whole, and of this model."""
    body = folder.read(header)
    try:
        if len(body["definition"]) == len(collections) == 1:  # wherever in the model it was
            body |= {part: dict(zip(collections, body[part].values())) for part in ("definition", "rows")}
        for rows in body["rows"].values():
            whole.check(header.parent / folder.ROWS, rows["store"])
            whole.check(header.parent / folder.ROWS, rows["cache"])
        tensors = dense.read(header.parent, body["dense"])
        run, saved = decode(body["run"], tensors), decode(body["model"], tensors)
        if len(run["rows"]) == len(collections) == 1:
            run["rows"] = dict(zip(collections, run["rows"].values()))
        _ = body["torch"], [run[name] for name in ("data", "grads", "generators", "optimizers")], saved["metadata"]
        for rows in run["rows"].values():
            Counters(**rows["counters"])
            _ = [rows[name] for name in ("handle", "split", "table_steps")]
            if (wrong := misfit(rows, _ROWS)) is not None:
                raise CheckpointError(f"{header} is wrong about its run: {wrong}; use another checkpoint")
        try:
            check_definitions(body["definition"], {n: definition(c) for n, c in collections.items()}, header)
            check_optimizers(run["optimizers"], parts, model)
            check_model(saved["state"], model)
            check_data(run["data"], data, [collection.engine for collection in collections.values()])
        except CheckpointError as error:
            raise _Mismatch(str(error)) from None
        except ValueError as error:  # of the loader or the lookahead, which know no file
            raise _Mismatch(f"{header} does not fit: {error}") from None
        for name, collection in collections.items():
            if not collection.engine.capacity.allows(run["rows"][name]["split"]):
                raise CheckpointError(f"{header} splits the cache as no run does: use another checkpoint")
            _ = body["rows"][name]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{header} lacks something ({error!r}): use another checkpoint") from error
    return body, run, saved


def _restore_rows(header: Path, rows: dict[str, Any], run: dict[str, Any], engine: Engine) -> None:
    """The rows of one collection: `rows` names their files, `run` says how they were trained."""
    files, store = header.parent / folder.ROWS, engine.store
    over = overlay(files, rows["cache"], store.layout)
    try:
        engine.restore(
            lambda: store.thaw(files, rows["store"], over),
            table_steps=run["table_steps"],
            split=run["split"],
            counters=Counters(**run["counters"]),
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:  # keys of no table, under a checksum that somebody has made
        raise CheckpointError(f"{header} does not fit the tables ({error}): use another checkpoint") from error
