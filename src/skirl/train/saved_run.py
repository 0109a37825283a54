"""A run restored from a checkpoint of `skirl train --save`, to predict with over any data of the same kind."""

import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import numpy as np
import torch
from torch import nn

from skirl.checkpoint import dense, folder, load
from skirl.checkpoint.decoding import decode
from skirl.core.batch import Batch
from skirl.data.files.columnar import embedded_schema
from skirl.data.files.find import find, kind_of
from skirl.data.files.numbered import numbered
from skirl.data.files.stream import Files
from skirl.data.flags import FILE_KINDS, OF_ORDER, DataFlags, Unlabelled
from skirl.data.source import Source
from skirl.data.vocabulary.growing import Growing
from skirl.nn.collection import collections_of
from skirl.tools.config import read_config
from skirl.tools.flags import WrongFlags, flags_of
from skirl.tools.sealed_json import CheckpointError, OtherVersion
from skirl.train.chosen import Chosen
from skirl.train.flags import CacheFlags, MovementFlags, PeerFlags, RateFlags, StepFlags
from skirl.train.recipe import Recipe
from skirl.train.resumed import run_of
from skirl.train.same_data import check_same_data

log = logging.getLogger("skirl")


@dataclass
class SavedRun:
    """A model with the rows of a checkpoint, and the batches to predict."""

    yields_fresh: ClassVar[bool] = True

    checkpoint: Path
    """The checkpoint's header."""
    step: int
    """The step after which the checkpoint was saved."""
    recipe: Recipe
    model: nn.Module
    source: Source
    """The samples to predict."""
    look_up: Callable[[Batch], Batch] | None
    """Gives ids their rows, with an open vocabulary."""
    threads: int
    """Number of compute threads."""

    @property
    def labelled(self) -> bool:
        """True if the samples have labels."""
        return bool(self.source.labels)

    def batches(self) -> Generator[tuple[Batch, np.ndarray], None, None]:
        """Yield the batches, each with the numbers of its samples among all rows of the data."""
        if isinstance(self.source, Files):
            for batch, numbers in numbered(self.source):
                yield batch if self.look_up is None else self.look_up(batch), numbers
            return
        done = 0
        for batch in self.source:
            yield batch, np.arange(done, done + len(batch.labels))
            done += len(batch.labels)


@contextmanager
def saved_run(chosen: Chosen, *, labelled: bool) -> Iterator[SavedRun]:
    """Open the newest whole checkpoint of a run for the length of a block. labelled: refuse data without labels."""
    first: CheckpointError | None = None
    for header in folder.headers(chosen.save):
        try:
            run = _opened(header, chosen, labelled)
        except OtherVersion:
            raise
        except CheckpointError as error:
            first = first or folder.naming(header, error)
            log.warning("%s", folder.naming(header, error))
            continue
        try:
            yield run
        finally:
            for collection in collections_of(run.model).values():
                collection.engine.store.close()
        return
    assert first is not None
    raise first


def _opened(header: Path, chosen: Chosen, labelled: bool) -> SavedRun:
    body = folder.read(header)
    flags = _flags(header, body)
    device = {"device": chosen.device, "threads": chosen.threads}
    try:
        recipe = _recipe(flags | {name: v for name, v in device.items() if v is not None}, _data(flags, chosen))
        recipe.check_labels()
    except ValueError as error:  # flags that skirl train would refuse
        raise error if type(error).__module__.startswith("skirl.") else WrongFlags(str(error)) from None
    stream, state = recipe.stream(), _place(header, body)
    if labelled and not stream.labels:
        raise ValueError(
            f"data {recipe.data.data} has no labels to compare predictions with: use skirl predict, which needs none"
        )
    source: Any = stream.inner if isinstance(stream, Growing) else stream
    if isinstance(source, Files) and state is not None:
        of_files = state["files"] if isinstance(stream, Growing) else state
        check_same_data(of_files["stream"], source)
    look_up = _vocabulary(stream, state, flags).look_up if isinstance(stream, Growing) else None
    if recipe.data.valid is not None:
        source = source.held_out
    recipe.use_threads()
    embeddings = recipe.embeddings(1, store="checkpoint")
    model, _ = recipe.model_over(embeddings)
    load(header, model=model)
    return SavedRun(header, embeddings.engine.counters.steps, recipe, model, source, look_up, torch.get_num_threads())


def _flags(header: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's flags from its checkpoint or, if an older skirl saved it, from its run folder."""
    known = flags_of(Recipe)
    state = run_of(body)
    if state is None:
        raise ValueError(
            f"{header} was saved by a loop that is not skirl train's, so it does not say what its model is: load it there, "
            "with skirl.load"
        )
    if "flags" in state:
        return {name: value for name, value in state["flags"].items() if name in known}
    if state["folder"] is not None and (Path(state["folder"]) / "config.json").is_file():
        config = Path(state["folder"]) / "config.json"
        others = json.loads(config.read_text())["flags"].keys()
        return read_config(config, known, others=others)
    raise ValueError(
        f"{header} does not have the run's flags, and its run folder {state['folder']} is gone: load it in a loop of your "
        "own, with skirl.load"
    )


def _data(flags: Mapping[str, Any], chosen: Chosen) -> DataFlags:
    """Return the run's data flags with the chosen ones. Flags that do not concern the rows to predict are reset."""
    given = {field.name: flags[field.name] for field in fields(DataFlags) if field.name in flags}
    for name in ("data", "valid", "schema", "vocab", "batch", "workers", "bad_rows"):
        if (value := getattr(chosen, name)) is not None:
            given[name] = value
    kind, was = given["data"].partition(":")[0], flags["data"].partition(":")[0]
    if chosen.data is not None and (kind in FILE_KINDS) != (was in FILE_KINDS):
        raise ValueError(
            f"data is {given['data']}, but the run was trained on {flags['data']}: set data to the same kind"
        )
    if kind in FILE_KINDS:
        given |= {"epochs": 1, "steps": None, "shuffle": 0}
        given |= {name: getattr(DataFlags, name) for name in OF_ORDER}
        if chosen.data is not None and chosen.schema is None:
            first = find(given["data"].partition(":")[2])[0]
            if kind_of(first) == "parquet" and embedded_schema(first) is not None:
                given["schema"] = None
    if chosen.held_out and flags.get("valid") is None:
        raise ValueError("the run held nothing out: set data to what to predict, or valid to a part of it")
    if not chosen.held_out and chosen.valid is None:
        given["valid"] = None
    return Unlabelled(**given)


def _recipe(flags: Mapping[str, Any], data: DataFlags) -> Recipe:
    """Return the run's recipe over this data. What only training needs stays at its default."""
    made: dict[str, Any] = {"data": data, "rates": RateFlags(), "step": StepFlags()}
    made |= {"cache": CacheFlags(), "movement": MovementFlags(), "peers": PeerFlags()}
    hints = get_type_hints(Recipe)
    for part in fields(Recipe):
        if part.name not in made:
            kind = hints[part.name]
            made[part.name] = kind(**{f.name: flags[f.name] for f in fields(kind) if f.name in flags})
    return Recipe(**made)


def _place(header: Path, body: Mapping[str, Any]) -> Any:
    """Return the state of the run's data when it was saved; None if no batch had been read."""
    state = decode(body["run"]["data"], dense.read(header.parent, body["dense"]))
    return state["loader"] if isinstance(state, dict) and "loader" in state else state


def _vocabulary(stream: Growing, state: Any, flags: Mapping[str, Any]) -> Growing:
    """Return a stream with the open vocabulary as it was when the run was saved."""
    if state is None:
        return stream
    if stream.stale is None:
        for table, growth in stream.growths.items():
            if table not in state["admitted"]:
                raise ValueError(
                    f"the run had no vocabulary for table {table!r}: set data and schema to those with the run's tables"
                )
            growth.give(state["admitted"][table])
        return stream
    try:  # the state has an older copy of the vocabulary; only the batches since then tell what was forgotten
        then = DataFlags(**{f.name: flags[f.name] for f in fields(DataFlags) if f.name in flags}).stream()
    except (ValueError, OSError) as error:
        raise ValueError(
            "an open vocabulary that forgets (--stale) is made again from the run's data up to the checkpoint, "
            f"{flags['data']}: {error}"
        ) from None
    assert isinstance(then, Growing)
    return then.at(state)
