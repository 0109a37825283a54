"""Save and load everything that a run needs to go on with the bits of a run that never stopped; docs/checkpoints.md
says how, and what the files hold.
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

    Call it after `dense.step()`, or outside the loop. One process at a time may save to a folder.

    **Arguments**

    - `path`: the folder of checkpoints; made if it is not there.
    - `model`: the model, with its embeddings.
    - `optimizers`: dense optimizers, schedulers, metrics and whatever else has `state_dict` and `load_state_dict`. None
      by default, since the rows' optimizer is part of the model.
    - `data`: the lookahead, or a loader with these two methods; without it a resumed run starts its data from the
      beginning.
    - `keep`: how many checkpoints stay in the folder, the newest ones; 1 takes the least room.
    - `wait`: return only when the checkpoint is on disk. That is the default because a script may end right after a
      save. False returns once training may go on; `Saving.wait` says when it is there, and the next save waits for it.

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
    """The last checkpoint of these rows, once it is on disk; if it could not be written, its error is raised, once."""
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
    # If only some of them had a part in it, all is written again.
    return last[0] if all(saving is last[0] for saving in last) else None


def _remember(engines: Mapping[str, Engine], saving: Saving | None) -> None:
    for engine in engines.values():
        engine.saving = saving


def load(path: str | Path, *, model: nn.Module, optimizers: Sequence[Any] = (), data: Any = None) -> None:
    """Resume from a checkpoint: make model, optimizers and lookahead as in the run that saved it, then load into them.

    Load before the loop: `with skirl.lookahead(...) as batches: skirl.load(..., data=batches)`, then iterate; a run
    over several passes goes on with `range(batches.epochs, n)`. The cache starts empty; its size, depth and prefetch
    may differ from the run that saved, and change no bit. There is an example at `skirl.save`.

    **Arguments**

    - `path`: the folder, or the header of one of its checkpoints. In a folder the newest checkpoint that is whole is
      taken: a damaged one is named in a warning, and the one before it is used. If none is left, or the checkpoint is
      of other tables, a `CheckpointError` says so and nothing has changed.
    - `model`: the model to load into.
    - `optimizers`: as given to `skirl.save`, in the same order; may be left out to evaluate.
    - `data`: as given to `skirl.save`; may be left out to evaluate.
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
    except Exception as error:  # somebody else wrote this header, with a checksum that is right
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
    """Load everything but the rows."""
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
    """The checkpoint is whole, but of another run; older ones in the folder would be too."""


def _read(
    header: Path, model: nn.Module, collections: Mapping[str, Collection], parts: list[Any], data: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A checkpoint's header, run and model, once all its files are seen to be whole and to fit this model."""
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
        except ValueError as error:  # from the loader or the lookahead, which do not know the file
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
    except (ValueError, TypeError) as error:  # keys of no table, with a checksum that is right
        raise CheckpointError(f"{header} does not fit the tables ({error}): use another checkpoint") from error
