"""Begin a run with another one's rows and dense weights, at step 0 of other data."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint.import_rows import copy_rows
from skirl.checkpoint.without_model import opened
from skirl.data.files.hashing import BY_OPEN
from skirl.data.source import Source
from skirl.nn.collection import TablePlace, collections_of, tables_of
from skirl.peers.base import Alone
from skirl.train.resume import Origin
from skirl.train.trainers import TrainerShare

log = logging.getLogger("skirl")


def begin_from(origin: Origin, model: nn.Module, stream: Source, share: TrainerShare | None = None) -> dict[str, Any]:
    """Copy rows and dense weights from a checkpoint. Check everything before changing anything."""
    path, share = Path(origin.given), TrainerShare(Alone()) if share is None else share
    with opened(path, share.peers) as (rows, dense, data, _):
        here, theirs = tables_of(model), tables_of(rows)
        _check_tables(here, theirs, path)
        _check_ids(data, stream.state_dict(), path)
        weights = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        if dense:
            _check_weights(weights, dense, path)
            model.load_state_dict({name: dense[name] for name in weights}, strict=False)
        else:
            if share.first:
                log.warning("%s has rows and no dense weights: these begin at their initial values", path)
        taken = copy_rows(here, theirs, path)
        same = all(place.optimizer.kind == theirs[name].optimizer.kind for name, place in here.items())
    for collection in collections_of(model).values():
        collection.forget()
    came = share.total({"rows": sum(taken.values())})
    return {"folder": str(path), **came, "row_state": same, "dense": bool(dense)}


def _check_tables(here: Mapping[str, TablePlace], theirs: Mapping[str, TablePlace], path: Path) -> None:
    if here.keys() != theirs.keys():
        only = sorted(here.keys() - theirs.keys()) or sorted(theirs.keys() - here.keys())
        where = "--data has" if only[0] in here else f"{path} has"
        other = str(path) if only[0] in here else "--data"
        raise ValueError(f"{where} a table {only[0]!r}, and {other} has none: give data with the same tables")
    for name, place in here.items():
        mine, other = place.table, theirs[name].table
        if mine.dim != other.dim:
            raise ValueError(f"--dim is {mine.dim}, and table {name!r} has {other.dim} in {path}: set it to that")
        if mine.rows != other.rows:
            raise ValueError(
                f"table {name!r} has {mine.rows:,} rows by --data and --rows, and {other.rows:,} in {path}: set them to "
                "what they were"
            )


def _check_ids(theirs: Any, mine: Any, path: Path) -> None:
    """Raise if ids would become other rows than before: each row would be trained further as that of another id."""
    saved, now = _stream_of(theirs), _stream_of(mine)
    if saved is None or now is None:  # not from files, or not read from yet
        return
    if BY_OPEN in (saved["rows_of"], now["rows_of"]):
        raise ValueError(
            f"--vocab open numbers rows as ids arrive, so ids of this run would get other rows than in {path}: make a "
            "vocabulary with skirl vocab for both runs, or hash ids"
        )
    if saved["rows_of"] != now["rows_of"]:
        raise ValueError(
            f"--vocab makes rows of ids {now['rows_of']}, in {path} it was {saved['rows_of']}: set --vocab to what it was"
        )


def _stream_of(state: Any) -> Mapping[str, Any] | None:
    """Return what a loader's state says of its files, or None."""
    files = state.get("files", state) if isinstance(state, dict) else {}
    stream = files.get("stream") if isinstance(files, dict) else None
    return stream if isinstance(stream, dict) and "rows_of" in stream else None


def _check_weights(here: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], path: Path) -> None:
    for name, value in here.items():
        if name not in theirs:
            raise ValueError(f"{path} has no weight {name!r}, which --model has: set --model to what it was")
        if theirs[name].shape != value.shape:
            raise ValueError(
                f"{name} is {list(value.shape)} by --model, {list(theirs[name].shape)} in {path}: set --model to what it was"
            )
