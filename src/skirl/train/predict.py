"""Metrics and predictions of a saved run."""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.core.batch import Batch
from skirl.data.files.columnar import KEY_OF_PREDICTIONS
from skirl.data.files.find import find
from skirl.data.flags import FILE_KINDS
from skirl.tools.in_thread import in_thread
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress
from skirl.train.chosen import Chosen
from skirl.train.forked import Forked, able, forked
from skirl.train.metrics import Metrics
from skirl.train.saved_run import SavedRun, saved_run
from skirl.train.scored import Fresh, scored

GROUP = 1 << 17
"""Rows in a Parquet row group."""


def evaluate(chosen: Chosen) -> dict[str, Any]:
    """Return the metrics of a saved run."""
    return _result("evaluate", chosen, None)


def predict(chosen: Chosen, into: Path) -> dict[str, Any]:
    """Write predictions of a saved run to a Parquet file. Return the result, with metrics if there are labels."""
    return _result("predict", chosen, into)


def _result(command: str, chosen: Chosen, into: Path | None) -> dict[str, Any]:
    started = time.monotonic()
    with saved_run(chosen, labelled=into is None) as run:
        data = run.recipe.data
        paths = find(data.path) if data.kind in FILE_KINDS else []
        if into is not None and into.exists() and any(into.samefile(path) for path in paths):
            raise ValueError(f"--into is {into}, which is one of the data files: name another file")
        about = {"checkpoint": str(run.checkpoint), "step": run.step, "data": data.data, "part": data.valid}
        metrics = Metrics() if run.labelled else None
        show = {"to": sys.stderr if chosen.json else sys.stdout, "quiet": chosen.quiet}
        samples, first, began, cpu = 0, 0, started, 0.0
        with (
            _processes(run) as team,
            Progress(command, steps=run.source.steps, **show) as progress,
            Predictions(into, labelled=run.labelled, about=about) as out,
            in_thread(_scored(run, team)) as scored,
        ):
            for done, (batch, logits, numbers) in enumerate(scored, start=1):
                if metrics is not None:
                    metrics.update(logits, batch.labels)
                out.write(numbers, logits, batch.labels)
                samples += len(numbers)
                if done == 1:  # the first batch loads kernels, so its time says nothing about the others
                    first, began, cpu = samples, time.monotonic(), _cpu_seconds()
                progress(done, lambda n=samples: {"samples": f"{n:,}"})
        ended, cpu = time.monotonic(), _cpu_seconds() - cpu
        scores = {} if metrics is None else asdict(metrics.scores())
    return {
        "command": command,
        **about,
        **scores,
        "samples": samples,
        "seconds": ended - started,
        "samples_per_second": (samples - first) / (ended - began) if samples > first else None,
        "cpu_us_per_sample": 1e6 * cpu / (samples - first) if samples > first else None,
        "into": None if into is None else str(into),
        "bytes": None if into is None else into.stat().st_size,
        "bad_rows_skipped": run.source.bad_rows,
        "peak_bytes": peak_bytes(),
        "machine": machine(),
        "failed": None,
    }


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the child processes that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _processes(run: SavedRun) -> AbstractContextManager[Forked | None]:
    """Return the processes that compute, if they can, or None. They must begin before any thread does."""
    return forked(run.model, run.threads) if run.threads > 1 and able(run.model) else nullcontext()


def _scored(run: SavedRun, team: Forked | None) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
    """Yield each batch with its logits and the numbers of its rows."""
    ahead: deque[np.ndarray] = deque()

    def batches(read: Iterable[tuple[Batch, np.ndarray]]) -> Iterator[Batch]:
        for batch, numbers in read:
            ahead.append(numbers)
            yield batch

    # One thread reads, one looks rows up, others compute, one writes. With processes: one reads, they compute, one writes.
    reading = in_thread(run.batches()) if team is None else closing(run.batches())
    with reading as read, closing(scored(run.model, Fresh(batches(read)), run.threads, team)) as found:
        for batch, logits in found:
            yield batch, logits.float().cpu().numpy(), ahead.popleft()


class Predictions:
    """A Parquet file of predictions, written one row group at a time. It appears once it is complete.

    Columns: `row`, the number of the row in the data, from 0; `prediction`, the probability of a click; `logit`, the
    model's output; `label`, if there are labels.
    """

    def __init__(self, path: Path | None, *, labelled: bool, about: dict[str, Any]) -> None:
        self._path, self._labelled = path, labelled
        fields = [("row", pa.int64()), ("prediction", pa.float32()), ("logit", pa.float32())]
        fields += [("label", pa.float32())] if labelled else []
        self._schema = pa.schema(fields, metadata={KEY_OF_PREDICTIONS: json.dumps(about).encode()})
        self._kept: list[list[np.ndarray]] = []
        self._rows = 0
        self._writer: Any = None

    def __enter__(self) -> Self:
        if self._path is not None:
            self._draft = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
            try:
                self._writer = pq.ParquetWriter(self._draft, self._schema, use_dictionary=False)
            except OSError as error:
                raise self._unwritable(error) from None
        return self

    def write(self, numbers: np.ndarray, logits: np.ndarray, labels: Any) -> None:
        """Add the predictions of a batch."""
        if self._writer is None:
            return
        columns = [numbers, probability(logits), logits]
        if self._labelled:
            columns.append(labels.numpy())
        self._kept.append(columns)
        self._rows += len(numbers)
        if self._rows >= GROUP:
            self._group()

    def _group(self) -> None:
        arrays = [
            _array(np.concatenate(column), of.type) for column, of in zip(zip(*self._kept, strict=True), self._schema)
        ]
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        try:
            self._writer.write_table(table, row_group_size=self._rows)
        except OSError as error:
            raise self._unwritable(error) from None
        self._kept, self._rows = [], 0

    def _unwritable(self, error: OSError) -> OSError:
        why = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        return OSError(f"{self._path} could not be written ({why}): nothing of it is kept, so name another place")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        assert self._path is not None
        try:
            if kind is None and self._rows:
                self._group()
            try:
                self._writer.close()
                if kind is None:
                    os.replace(self._draft, self._path)
            except OSError as failed:
                if kind is None:
                    raise self._unwritable(failed) from None
        finally:
            self._draft.unlink(missing_ok=True)


def _array(values: np.ndarray, of: pa.DataType) -> pa.Array:
    """Return an Arrow array. `pa.array` would import pandas if it is installed."""
    return pa.Array.from_buffers(of, len(values), [None, pa.py_buffer(values)])


def probability(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid, computed in float64 and rounded once.

    >>> probability(np.array([0.0, 200.0], np.float32)).tolist()
    [0.5, 1.0]
    """
    x = logits.astype(np.float64)
    tail = np.exp(-np.abs(x))
    return (np.where(x >= 0, 1.0, tail) / (1 + tail)).astype(np.float32)
