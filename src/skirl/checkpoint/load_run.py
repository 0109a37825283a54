"""Load a saved run into a model, optimizers and a lookahead made like those of the run that saved it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint import codec, folder
from skirl.checkpoint.codec import decode, with_metadata
from skirl.checkpoint.definition import check_data, check_fits, listed
from skirl.checkpoint.rows import OwnRows, rows_for
from skirl.checkpoint.saving import Saving, remember, settled
from skirl.checkpoint.votes import Mismatch, agreed, digest_of, take_newest, trainers_of
from skirl.engine.work import Counters
from skirl.nn.collection import collections_of
from skirl.peers.base import Peers
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
