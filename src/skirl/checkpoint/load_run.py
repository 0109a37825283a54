"""Load a saved run into a model, optimizers and a lookahead made like those of the run that saved it: they are compared
field by field before anything changes, and an error names the first difference."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode, with_metadata
from skirl.checkpoint.rows import OwnRows, rows_for
from skirl.checkpoint.saving import Saving, definition, listed, optimizer, remember, settled
from skirl.checkpoint.votes import Mismatch, agreed, digest_of, take_newest, trainers_of
from skirl.engine.engine import Engine
from skirl.engine.work import Counters
from skirl.nn.collection import collections_of
from skirl.peers.base import Peers
from skirl.pipeline.lookahead import Lookahead
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
    parts = listed(optimizers)
    settled(engines)
    peers, changed = trainers_of(model), list[Path]()

    def take(header: Path, digest: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, OwnRows]]:
        files = header.parent / folder.ROWS

        def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, OwnRows]]:
            """Check that all files that this trainer needs are undamaged and fit the model."""
            body = folder.read(header)
            if peers.rank and digest_of(header) != digest:
                raise CheckpointError(f"{header} is not the one that rank 0 has: give all trainers one folder")
            rows_of = rows_for(body, peers, engines)
            for rows in rows_of.values():
                rows.check(files)
            tensors = codec.read_dense(header.parent, body["dense"])
            body["run"], saved = decode(body["run"], tensors), decode(body["model"], tensors)
            try:
                check_fits(body, model, parts, saved["state"], header)
                check_data(body["run"]["data"], data, [*engines.values()])
            except CheckpointError as error:
                raise Mismatch(str(error)) from None
            except ValueError as error:  # from the loader or the lookahead, which cannot name the file
                raise Mismatch(f"{header} does not fit: {error}") from None
            for name in engines:
                body["run"]["rows"][name]["counters"] = _counters(body["parts"], name, peers)
            return body, saved, rows_of

        def take_rows() -> None:
            for name, collection in collections.items():
                known = body["run"]["rows"][name]
                steps, counters = known["table_steps"], known["counters"]
                collection.restore(rows_of[name], files, table_steps=steps, counters=counters)
                changed.append(header)

        body, saved, rows_of = agreed(peers, read, "checkpoint offered")
        agreed(peers, take_rows, "checkpoint taken")
        return body, saved, rows_of

    try:
        header, (body, saved, rows_of) = take_newest(Path(path), peers, take)
    except CheckpointError:
        for engine in engines.values() if changed else ():
            engine.lose(f"{changed[-1]} could be read only in part: some collections have its rows, others do not")
        raise
    run = body["run"]
    for name, collection in collections.items():
        collection.forget()
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
    last = Saving(header.parent, folder.number_of(header))
    last.files = {name: written for name, rows in rows_of.items() if (written := rows.written)}
    remember(engines, last)
    if body["torch"] != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", body["torch"], torch.__version__)


def _counters(parts: list[dict[str, Any]], name: str, peers: Peers) -> Counters:
    """Return the counters with which a trainer continues. Each part's go to exactly one trainer: the sum stays."""
    first, *others = [part["counters"][name] for part in (parts[0], *parts[peers.rank :: peers.size])]
    return Counters(**{of: sum(other[of] for other in others) for of in first} | {"steps": first["steps"]})


def check_fits(body: dict[str, Any], model: nn.Module, parts: Sequence[Any], state: dict[str, Any], path: Path) -> None:
    """Raise unless collections, optimizers (if given) and the model's `state` were like those of a header when saved."""
    here = {name: definition(collection) for name, collection in collections_of(model).items()}
    check_same(dict.fromkeys(body["definition"]), dict.fromkeys(here), path)
    for name, of in here.items():
        check_same(_by_table(body["definition"][name]), _by_table(of), path)
    if parts:
        each = body["run"]["optimizers"], [optimizer(part, model) for part in parts]
        saved, now = (
            {f"optimizers[{i}]": {n: p[n] for n in ("type", "parameters")} for i, p in enumerate(of)} for of in each
        )
        check_same(saved, now, path)
    check_same(_described(state), _described(model.state_dict()), path)


def _by_table(definition: dict[str, Any]) -> dict[str, Any]:
    tables = {table["name"]: table for table in definition["tables"]}
    return {**definition, "tables": [*tables], **{f"table {name!r}": table for name, table in tables.items()}}


def _described(state: dict[str, Any]) -> dict[str, str]:
    """Torch itself refuses other shapes, but would round other dtypes silently."""
    return {n: f"{list(v.shape)} {v.dtype}" if isinstance(v, torch.Tensor) else "" for n, v in state.items()}


def check_same(saved: Any, here: Any, path: Path, where: str = "") -> None:
    """Raise a CheckpointError that names the first difference between what was saved and what is here."""
    if not (isinstance(saved, dict) and isinstance(here, dict)):
        if saved != here:
            was, now = f"{saved!r:.300}", f"{here!r:.300}"
            raise CheckpointError(f"{path} was saved with {where} = {was}, here it is {now}: set it to what was saved")
    elif saved.get("type") != here.get("type"):
        check_same(saved.get("type"), here.get("type"), path, where)
    else:
        for name in dict.fromkeys([*saved, *here]):
            if name not in saved or name not in here:
                there = "has" if name in saved else "has no"
                raise CheckpointError(
                    f"{path} {there} {name or 'rows of the model itself'}, unlike this model: make all as it was "
                    "saved, or take the rows alone with skirl.import_rows"
                )
            check_same(saved[name], here[name], path, f"{where}.{name}" if where else name)


def check_data(saved: Any, data: Any, engines: Sequence[Engine]) -> None:
    if data is None:
        return
    if saved is None:
        raise CheckpointError("the checkpoint was saved without data: leave data out, or save with data=batches")
    if isinstance(data, Lookahead) and not {*engines} <= {*data.engines}:
        raise CheckpointError("data is a lookahead over another model: pass the one over the model that is loaded")
    if hasattr(data, "check_state"):
        data.check_state(saved)
