"""Save and load everything that a run needs to go on with the bits of a run that never stopped; docs/checkpoints.md
says how, and what the files hold.
"""

import logging
import time
from collections.abc import Sequence
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
    check_definition,
    check_model,
    check_optimizers,
    definition,
    listed,
    parameters,
)
from skirl.checkpoint.folder import FORMAT, FORMAT_VERSION, numbers
from skirl.checkpoint.saving import Frozen, Saving, write
from skirl.engine.engine import Counters, Engine
from skirl.nn.collection import Collection, collection_of
from skirl.store.snapshot import DISK_ROWS
from skirl.tools import rng_state
from skirl.tools.interrupts import uninterrupted
from skirl.tools.sealed_json import CheckpointError, OtherVersion, skirl_version
from skirl.tools.shape_of import COUNT, NUMBER, Kind, misfit

__all__ = ["Saving", "load", "numbers", "save"]

log = logging.getLogger("skirl")

_RATE = Kind("a number", lambda v: NUMBER.fits(v) or (isinstance(v, torch.Tensor) and v.numel() == 1))
_RUN = {
    "counters": {...: COUNT},
    "rows": {"handle": {"param_groups": [{"lr": _RATE}]}, "table_steps": [COUNT]},
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
    collection = collection_of(model)
    engine = collection.engine
    engine.check()
    parts = listed(optimizers)
    before = _settled(engine)
    if collection.lookahead is not None:
        collection.lookahead.settle()
        collection.lookahead.drain()
    else:
        collection.finish()
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
                "handle": collection.optimizer.state_dict(),
                "table_steps": engine.table_steps.tolist(),
                "split": engine.split,
            },
            "grads": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            "counters": asdict(engine.counters),
            "data": None if data is None else data.state_dict(),
            "generators": rng_state.capture(),
        },
        "run",
    )
    (path / folder.ROWS).mkdir(parents=True, exist_ok=True)
    saving = Saving(path, max([0, *numbers(path)]) + 1)
    with uninterrupted():
        taken: Frozen | None = None
        try:
            taken = frozen = Frozen(engine, path, before)
            state = model.state_dict()  # after rows are frozen: it names the generation
            coded, more = encode({"state": state, "metadata": getattr(state, "_metadata", None)}, "model")
            body = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "skirl": skirl_version(),
                "torch": torch.__version__,
                "definition": definition(collection),
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
            engine.saving = None if before is None else before.bare()
            raise
        engine.saving = saving
    if wait:
        _settled(engine)
    saving.pause = time.perf_counter() - began
    return saving


def _settled(engine: Engine) -> Saving | None:
    """The last checkpoint of this engine, once it is on disk; if it could not be written, its error is raised, once."""
    last = engine.saving
    if last is None:
        return None
    try:
        return last.wait()
    except BaseException:
        if last.done:
            engine.saving = last.given_up()
        raise


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
    collection = collection_of(model)
    engine = collection.engine
    engine.check_process()
    parts = listed(optimizers)
    if collection.lookahead is not None and collection.lookahead.iterating:
        raise RuntimeError(
            "a lookahead is already iterating over these embeddings: load before its loop, or leave its with-block first"
        )
    _settled(engine)
    candidates = folder.headers(Path(path))
    first: CheckpointError | None = None
    for header in candidates:
        try:
            body, run, saved = _read(header, model, collection, parts, data)
            _restore_rows(header, body, run, engine)
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
        raise first
    collection.forget()
    try:
        _apply(run, saved, model, collection, parts, data)
    except Exception as error:  # somebody else wrote this header, with a checksum that is right
        engine.damage = f"{header} is not what skirl.save writes ({error!r}): load another checkpoint"
        raise CheckpointError(engine.damage) from error
    last = Saving(header.parent, folder.number_of(header))
    last.files = body["rows"] if body["rows"]["store"]["kind"] != DISK_ROWS else {}
    engine.saving = last
    if body["torch"] != torch.__version__:
        log.warning("saved with torch %s, this is %s: bits may differ from here on", body["torch"], torch.__version__)


def _apply(
    run: dict[str, Any], saved: dict[str, Any], model: nn.Module, collection: Collection, parts: list[Any], data: Any
) -> None:
    """Load everything but the rows."""
    collection.optimizer.load_state_dict(run["rows"]["handle"])
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
    header: Path, model: nn.Module, collection: Collection, parts: list[Any], data: Any
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A checkpoint's header, run and model, once all its files are seen to be whole and to fit this model."""
    body = folder.read(header)
    try:
        whole.check(header.parent / folder.ROWS, body["rows"]["store"])
        whole.check(header.parent / folder.ROWS, body["rows"]["cache"])
        tensors = dense.read(header.parent, body["dense"])
        run, saved = decode(body["run"], tensors), decode(body["model"], tensors)
        Counters(**run["counters"])
        _ = body["torch"], [run["rows"][name] for name in ("handle", "split", "table_steps")]
        _ = [run[name] for name in ("data", "grads", "generators", "optimizers")], saved["metadata"]
        if not collection.engine.may_split(run["rows"]["split"]):
            raise CheckpointError(f"{header} splits the cache as no run does: use another checkpoint")
        if (wrong := misfit(run, _RUN)) is not None:
            raise CheckpointError(f"{header} is wrong about its run: {wrong}; use another checkpoint")
        try:
            check_definition(body["definition"], definition(collection), header)
            check_optimizers(run["optimizers"], parts, model)
            check_model(saved["state"], model)
            check_data(run["data"], data, collection.engine)
        except CheckpointError as error:
            raise _Mismatch(str(error)) from None
        except ValueError as error:  # from the loader or the lookahead, which do not know the file
            raise _Mismatch(f"{header} does not fit: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{header} lacks something ({error!r}): use another checkpoint") from error
    return body, run, saved


def _restore_rows(header: Path, body: dict[str, Any], run: dict[str, Any], engine: Engine) -> None:
    rows, store = header.parent / folder.ROWS, engine.store
    over = overlay(rows, body["rows"]["cache"], store.layout)
    try:
        engine.restore(
            lambda: store.thaw(rows, body["rows"]["store"], over),
            table_steps=run["rows"]["table_steps"],
            split=run["rows"]["split"],
            counters=Counters(**run["counters"]),
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:  # keys of no table, with a checksum that is right
        raise CheckpointError(f"{header} does not fit the tables ({error}): use another checkpoint") from error
