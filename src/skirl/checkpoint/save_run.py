"""Save everything that a run needs to continue."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skirl.checkpoint import folder
from skirl.checkpoint.codec import encode
from skirl.checkpoint.definition import definition, listed, optimizer
from skirl.checkpoint.folder import FORMAT, FORMAT_VERSION, numbers
from skirl.checkpoint.rows import freeze_all
from skirl.checkpoint.saving import Saving, remember, settled, told_of, write
from skirl.checkpoint.votes import trainers_of
from skirl.nn.collection import Collection, collections_of
from skirl.store.base import Frozen
from skirl.tools import __version__, rng_state
from skirl.tools.interrupts import uninterrupted
from skirl.tools.sealed_json import CheckpointError


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
    with told_of(Path(path)):
        return _save(Path(path), model, optimizers, data, keep_last, wait)


def _save(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Any],
    data: Any,
    keep: int,
    wait: bool,
) -> Saving:
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
    writing = partial(write, saving, peers, keep, part)
    frozen: Frozen | None = None
    try:
        (path / folder.ROWS).mkdir(parents=True, exist_ok=True)
        if peers.rank == 0:
            saving.claim()
        saving.number = max([0, *numbers(path)]) + 1
        with uninterrupted():
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
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "skirl": __version__,
        "torch": torch.__version__,
        "definition": {name: definition(collection) for name, collection in collections.items()},
        "model": coded,
        "run": run,
        "shards": shards if type(shards) is int else trainers,
        "of_sweep": any(collection.of_sweep for collection in collections.values()),
    }
    return body, tensors
