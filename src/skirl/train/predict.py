"""Metrics and predictions of a saved run, over any data of the same kind."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from skirl.checkpoint import codec, folder, load
from skirl.checkpoint.codec import decode, loader_state
from skirl.checkpoint.votes import take_newest
from skirl.core.batch import Batch
from skirl.data.files.columnar import KEY_OF_PREDICTIONS, embedded_schema, parquet_at
from skirl.data.files.find import find, kind_of
from skirl.data.files.stream import Files
from skirl.data.flags import FILE_KINDS, DataFlags, Unlabelled, check_files
from skirl.data.source import Source
from skirl.data.vocabulary.growing import Growing
from skirl.nn.collection import collections_of
from skirl.peers.base import Alone
from skirl.tools.flags import WrongFlags, flags_of
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import progress_of
from skirl.train.flags import CacheFlags, MovementFlags, RateFlags, SavedFlags, StepFlags
from skirl.train.metrics import Metrics, evaluating
from skirl.train.recipe import Recipe
from skirl.train.resume import check_same_data, run_of

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class SavedRun:
    """A model with the rows of a checkpoint, and the batches to predict."""

    checkpoint: Path
    """Its header."""
    step: int
    recipe: Recipe
    model: nn.Module
    source: Source
    look_up: Callable[[Batch], Batch] | None
    """Gives ids their rows, with an open vocabulary."""
    threads: int

    def close(self) -> None:
        for collection in collections_of(self.model).values():
            collection.engine.store.close()

    def batches(self) -> Generator[tuple[Batch, np.ndarray], None, None]:
        if isinstance(self.source, Files):
            for batch, numbers in self.source.numbered():
                yield batch if self.look_up is None else self.look_up(batch), numbers
            return
        done = 0
        for batch in self.source:
            yield batch, np.arange(done, done + len(batch.labels))
            done += len(batch.labels)


def _opened(header: Path, chosen: SavedFlags, labelled: bool) -> SavedRun:
    """Open a checkpoint of a run. labelled: refuse data without labels."""
    body, known = folder.read(header), flags_of(Recipe)
    if (run := run_of(body)) is None:
        raise ValueError(f"{header} was saved by another loop than skirl train's: load it there, with skirl.load")
    flags = {name: value for name, value in run["flags"].items() if name in known}
    device = {"device": chosen.device, "threads": chosen.threads}
    try:
        recipe = _recipe(flags | {name: v for name, v in device.items() if v is not None}, _data(flags, chosen))
        recipe.check_labels()
    except ValueError as error:  # flags that skirl train would refuse
        raise error if type(error).__module__.startswith("skirl.") else WrongFlags(str(error)) from None
    tensors = codec.read_dense(header.parent, body["dense"])
    stream, state = recipe.stream(), loader_state(decode(body["run"]["data"], tensors))
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


def _data(flags: Mapping[str, Any], chosen: SavedFlags) -> DataFlags:
    """The run's data flags with the chosen ones. Flags that do not concern the rows to predict are reset."""
    given = {field.name: flags[field.name] for field in fields(DataFlags) if field.name in flags}
    for name in ("data", "valid", "schema", "vocab", "batch", "workers", "bad_rows"):
        if (value := getattr(chosen, name)) is not None:
            given[name] = value
    kind, was = given["data"].partition(":")[0], flags["data"].partition(":")[0]
    if chosen.data is not None and kind != was and "synthetic" in (kind, was):
        raise ValueError(
            f"data is {given['data']}, but the run was trained on {flags['data']}: set data to the same kind"
        )
    if kind in FILE_KINDS:
        given |= {"epochs": 1, "steps": None, "shuffle": 0, "session_order": "keep"}
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
    """The run's recipe over this data. What only training needs stays at its default."""
    made: dict[str, Any] = {"data": data, "rates": RateFlags(), "step": StepFlags()}
    made |= {"cache": CacheFlags(), "movement": MovementFlags()}
    hints = get_type_hints(Recipe)
    for part in fields(Recipe):
        if part.name not in made:
            kind = hints[part.name]
            made[part.name] = kind(**{f.name: flags[f.name] for f in fields(kind) if f.name in flags})
    return Recipe(**made)


def _vocabulary(stream: Growing, state: Any, flags: Mapping[str, Any]) -> Growing:
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


GROUP = 1 << 17  # rows in a Parquet row group


def predict(chosen: SavedFlags, out: Path | None = None) -> dict[str, Any]:
    """The metrics of a saved run, if there are labels. out: write its predictions to this Parquet file."""
    started, command = time.monotonic(), "evaluate" if out is None else "predict"
    _, run = take_newest(chosen.checkpoint, Alone(), lambda header, _: _opened(header, chosen, labelled=out is None))
    with closing(run):
        data, labelled = run.recipe.data, bool(run.source.labels)
        if out is not None and data.kind in FILE_KINDS:
            check_files(data.data, out)
        about = {"checkpoint": str(run.checkpoint), "step": run.step, "data": data.data, "part": data.valid}
        metrics = Metrics() if labelled else None
        samples = 0
        with (
            progress_of(command, run.source.steps) as progress,
            predictions_in(out, labelled=labelled, about=about) as write,
            in_thread(_scored(run)) as scored,
        ):
            for done, (batch, logits, numbers) in enumerate(scored, start=1):
                if metrics is not None:
                    metrics.update(logits, batch.labels)
                write(numbers, logits, batch.labels)
                samples += len(numbers)
                progress(done, lambda n=samples: {"samples": f"{n:,}"})
        seconds = time.monotonic() - started
        scores = {} if metrics is None else asdict(metrics.scores())
    return {
        "command": command, **about, **scores, "samples": samples, "seconds": seconds,
        "samples_per_second": samples / seconds,
        "out": None if out is None else str(out), "bytes": None if out is None else out.stat().st_size,
        "bad_rows_skipped": run.source.bad_rows, "peak_bytes": peak_bytes(), "machine": machine(), "failed": None,
    }  # fmt: skip


def _scored(run: SavedRun) -> Generator[tuple[Batch, np.ndarray, np.ndarray], None, None]:
    """Yield each batch with its logits and the numbers of its rows. One thread reads, others compute."""
    ahead: deque[np.ndarray] = deque()

    def batches(read: Iterable[tuple[Batch, np.ndarray]]) -> Iterator[Batch]:
        for batch, numbers in read:
            ahead.append(numbers)
            yield batch

    with in_thread(run.batches()) as read, closing(scored(run.model, batches(read), run.threads)) as found:
        for batch, logits in found:
            yield batch, logits.float().cpu().numpy(), ahead.popleft()


def scored(
    model: nn.Module, batches: Iterable[Batch], threads: int
) -> Generator[tuple[Batch, torch.Tensor], None, None]:
    """Yield each batch with its logits. Threads that share a batch of a thousand samples wait for each other at each small
    layer. So each computes a batch of its own, if the first batch gets the same bits either way. A batch of another size
    uses all threads, as does any batch of a sequence model, whose shapes depend on more than the size."""
    apart = all(each.engine.device.by_any_thread and each.pooled for each in collections_of(model).values())
    before, odd = torch.get_num_threads(), threading.Lock()

    def computed(batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return model(batch)

    try:
        with evaluating(model, batches) as found:
            torch.set_num_threads(1 if apart else threads)
            if (first := next(found, None)) is None:
                return
            alone = logits = computed(first)
            if apart and threads > 1:
                torch.set_num_threads(threads)
                logits = computed(first)
            yield first, logits
            if threads == 1 or not apart or not torch.equal(alone, logits):
                yield from ((batch, computed(batch)) for batch in found)
                return
            torch.set_num_threads(1)  # for each of the threads that begin now

            def one(batch: Batch) -> tuple[Batch, torch.Tensor]:
                if len(batch.labels) == len(logits):
                    return batch, computed(batch)
                with odd:
                    torch.set_num_threads(threads)
                    try:
                        return batch, computed(batch)
                    finally:
                        torch.set_num_threads(1)

            with side_by_side(one, found, threads) as results:
                yield from results
    finally:
        torch.set_num_threads(before)


@contextmanager
def side_by_side(work: Callable[[T], R], items: Iterator[T], threads: int) -> Iterator[Iterator[R]]:
    """Do `work` in several threads, with results in the order of `items`."""
    pool = ThreadPoolExecutor(threads, "skirl-side")

    def results() -> Iterator[R]:
        ahead = deque[Future[R]]()
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        yield from (future.result() for future in ahead)

    try:
        yield results()
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def in_thread(items: Generator[T, None, None]) -> Iterator[Iterator[T]]:
    """Read items ahead in a thread. When the block has ended, so have the thread and the generator."""
    end: Any = object()
    try:
        with side_by_side(lambda _: next(items, end), repeat(None), 1) as coming:
            yield iter(partial(next, coming), end)
    finally:
        items.close()


@contextmanager
def predictions_in(
    path: Path | None, *, labelled: bool, about: dict[str, Any]
) -> Iterator[Callable[[np.ndarray, np.ndarray, Any], None]]:
    """Write a Parquet file of predictions, one row group at a time. It appears once it is complete. `row` is the number of
    the row in the data, from 0; `prediction`, the probability of a click; `logit`, the model's output."""
    if path is None:
        yield lambda numbers, logits, labels: None
        return
    fields = [("row", pa.int64()), ("prediction", pa.float32()), ("logit", pa.float32())]
    fields += [("label", pa.float32())] if labelled else []
    schema = pa.schema(fields, metadata={KEY_OF_PREDICTIONS: json.dumps(about).encode()})
    kept: list[list[np.ndarray]] = []

    def write(numbers: np.ndarray, logits: np.ndarray, labels: Any) -> None:
        kept.append([numbers, probability(logits), logits, *([labels.numpy()] if labelled else [])])
        if sum(len(part[0]) for part in kept) >= GROUP:
            end_group()

    def end_group() -> None:
        columns = zip(zip(*kept, strict=True), schema)
        put(pa.Table.from_arrays([pa.array(np.concatenate(c), of.type) for c, of in columns], schema=schema))
        kept.clear()

    with parquet_at(path) as put:
        yield write
        if kept:
            end_group()


def probability(logits: np.ndarray) -> np.ndarray:
    """The sigmoid, computed in float64 and rounded once."""
    x = logits.astype(np.float64)
    tail = np.exp(-np.abs(x))
    return (np.where(x >= 0, 1.0, tail) / (1 + tail)).astype(np.float32)
