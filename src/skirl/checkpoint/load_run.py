"""Load a saved run into a model, optimizers and a lookahead made like those of the run that saved it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode, with_metadata
from skirl.checkpoint.definition import (
    check_data,
    check_definitions,
    check_model,
    check_optimizers,
    definition,
    listed,
)
from skirl.checkpoint.rows import OwnRows, rows_for
from skirl.checkpoint.saving import Saving, remember, settled
from skirl.checkpoint.votes import Mismatch, Votes, digest_of, take_newest, trainers_of
from skirl.engine.work import Counters
from skirl.nn.collection import Collection, collections_of
from skirl.tools import rng_state
from skirl.tools.sealed_json import CheckpointError

log = logging.getLogger("skirl")


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizers: Sequence[Any] = (),
    data: Any = None,
) -> None:
    """Resume from a checkpoint: make model, optimizers and lookahead as in the run that saved it, then load into them.

    Load before the loop: `with skirl.lookahead(...) as batches: skirl.load(..., data=batches)`, then iterate. A run
    over several passes continues with `range(batches.epochs, n)`. The cache starts empty. Its size, depth and prefetch
    may differ from the run that saved without changing a bit, and so may the number of trainers, which must all load at
    once. See `skirl.save` for an example.

    **Arguments**

    - `path`: the folder, or the header of one of its checkpoints. From a folder, the newest undamaged checkpoint is
      taken, and a warning names damaged ones. If none is left, or the checkpoint is of other tables, a
      `CheckpointError` says so and nothing has changed.
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
    here = _Here(model, collections, listed(optimizers), data)
    settled(engines)
    votes, changed = Votes(trainers_of(model)), list[Path]()

    def take(header: Path, digest: str) -> _Found:
        found = votes.agreed(lambda: _read(header, digest, here, votes), "checkpoint offered")
        votes.agreed(lambda: _take_rows(header, found, collections, changed), "checkpoint taken")
        return found

    try:
        header, found = take_newest(Path(path), votes, take)
    except CheckpointError:
        for engine in engines.values() if changed else ():
            engine.lose(f"{changed[-1]} could be read only in part: some collections have its rows, others do not")
        raise
    for collection in collections.values():
        collection.forget()
    _apply(found.run, found.saved, here)
    last = Saving(header.parent, folder.number_of(header))
    last.files = {name: written for name, rows in found.rows.items() if (written := rows.written)}
    remember(engines, last)
    if found.torch != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", found.torch, torch.__version__)


class _Here(NamedTuple):
    """What a checkpoint is loaded into."""

    model: nn.Module
    collections: Mapping[str, Collection]
    parts: list[Any]
    data: Any


class _Found(NamedTuple):
    run: dict[str, Any]
    saved: dict[str, Any]
    rows: dict[str, OwnRows]
    torch: str


def _apply(run: dict[str, Any], saved: dict[str, Any], here: _Here) -> None:
    for name, collection in here.collections.items():
        collection.optimizer.load_state_dict(run["rows"][name]["handle"])
    here.model.load_state_dict(with_metadata(saved["state"], saved["metadata"]))
    for name, parameter in here.model.named_parameters():
        grad = run["grads"].get(name)
        parameter.grad = None if grad is None else grad.to(parameter.device)
    for part, known in zip(here.parts, run["optimizers"] if here.parts else [], strict=True):
        part.load_state_dict(known["state"])
    if here.data is not None:
        here.data.load_state_dict(run["data"])
    rng_state.restore(run["generators"])


def _read(header: Path, digest: str, here: _Here, votes: Votes) -> _Found:
    """Read a checkpoint, and check that all files this trainer needs are undamaged and fit the model."""
    body = folder.read(header)
    if votes.rank and digest_of(header) != digest:
        raise CheckpointError(f"{header} is not the one that rank 0 has: give all trainers one folder")
    engines = {name: collection.engine for name, collection in here.collections.items()}
    rows_of = rows_for(body, votes, engines)
    for rows in rows_of.values():
        rows.check(header.parent / folder.ROWS)
    tensors = codec.read_dense(header.parent, body["dense"])
    run, saved = decode(body["run"], tensors), decode(body["model"], tensors)
    try:
        check_definitions(body["definition"], {n: definition(c) for n, c in here.collections.items()}, header)
        check_optimizers(run["optimizers"], here.parts, here.model)
        check_model(saved["state"], here.model)
        check_data(run["data"], here.data, [*engines.values()])
    except CheckpointError as error:
        raise Mismatch(str(error)) from None
    except ValueError as error:  # from the loader or the lookahead, which cannot name the file
        raise Mismatch(f"{header} does not fit: {error}") from None
    for name in here.collections:
        run["rows"][name]["counters"] = _counters(body["parts"], name, votes)
    return _Found(run, saved, rows_of, body["torch"])


def _counters(parts: list[dict[str, Any]], name: str, votes: Votes) -> dict[str, int]:
    """Return the counters with which a trainer continues. Each part's go to exactly one trainer: the sum stays."""
    first, *others = [part["counters"][name] for part in (parts[0], *parts[votes.rank :: votes.size])]
    Counters(**first)
    return {of: sum(other[of] for other in others) for of in first} | {"steps": first["steps"]}


def _take_rows(header: Path, found: _Found, collections: Mapping[str, Collection], changed: list[Path]) -> None:
    """Have all collections take their rows. `changed` gets the header once one of them has."""
    for name, collection in collections.items():
        run = found.run["rows"][name]
        collection.restore(
            found.rows[name],
            header.parent / folder.ROWS,
            table_steps=run["table_steps"],
            counters=Counters(**run["counters"]),
        )
        changed.append(header)
