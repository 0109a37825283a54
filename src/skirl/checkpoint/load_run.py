"""Load a saved run: into a model, optimizers and a lookahead made as those of the run that saved it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint import dense, folder, whole
from skirl.checkpoint.cached_rows import overlay
from skirl.checkpoint.codec import decode, with_metadata
from skirl.checkpoint.definition import (
    check_data,
    check_definitions,
    check_model,
    check_optimizers,
    definition,
    listed,
)
from skirl.checkpoint.saving import Saving, remember, settled
from skirl.engine.engine import Counters, Engine
from skirl.nn.collection import Collection, collections_of
from skirl.store.base import DISK_ROWS
from skirl.tools import rng_state
from skirl.tools.sealed_json import CheckpointError, OtherVersion
from skirl.tools.shape_of import COUNT, NUMBER, Kind, misfit

log = logging.getLogger("skirl")

_RATE = Kind("a number", lambda v: NUMBER.fits(v) or (isinstance(v, torch.Tensor) and v.numel() == 1))
_ROWS = {
    "counters": {...: COUNT},
    "handle": {"param_groups": [{"lr": _RATE}]},
    "table_steps": [COUNT],
}


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
        collection.engine.check_alone("skirl.load")
        if collection.lookahead is not None and collection.lookahead.iterating:
            raise RuntimeError(
                "a lookahead is already iterating over these embeddings: load before its loop, or leave its with-block "
                "first"
            )
    parts = listed(optimizers)
    settled(engines)
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
    remember(engines, last)
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
