"""The tasks of `skirl convert` on a cluster: functions of Arrow batches, as Spark's `mapInArrow` calls them.

Rows travel in frames, many rows in one binary value, so that no engine has to convert our types to its own.
"""

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from skirl.data.files.dataset import RowPosition
from skirl.data.files.stream import Files
from skirl.dedup.finish import WrittenColumns, finish, keys_of, measured
from skirl.dedup.frames import framed, ordered, packing_of
from skirl.dedup.local import sessions_in
from skirl.dedup.order import partitions_of
from skirl.dedup.plan import part_of
from skirl.dedup.spill import ALL, Spill, Spilled
from skirl.dedup.stretch import Stretch
from skirl.dedup.wanted import loads
from skirl.tools.os_errors import NotWritten, writing

FRAMES = {
    "task": "int", "number": "int", "bucket": "int", "partition": "bigint", "rows": "bigint", "size": "bigint",
    "keys": "binary", "frame": "binary",
}  # fmt: skip
"""Columns of frames: task and number give its position in the data; keys holds the sort keys of its rows."""
TOLD = {"told": "string"}
"""A column of JSON."""
_KINDS = {"int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary(), "string": pa.string()}
TOGETHER = 8 << 20
"""Bytes of frames at which a batch is complete."""
READING, DONE, REFUSED = "reading", "done", "refused"
"""Prefixes of the files in which a task reports its rows so far, its final counts, and an error that ends the command."""


@contextmanager
def telling(folder: Path, task: int) -> Iterator[None]:
    """Write errors meant for the user to a file instead of raising them: a cluster would retry the task, and fail again.

    **Arguments**

    - `folder`: folder to write to.
    - `task`: number of the task.
    """
    try:
        yield
    except (ValueError, NotWritten) as error:
        tell(folder / f"{REFUSED}-{task:06}", {"text": str(error), "errno": getattr(error, "errno", None)})


def tell(path: Path, what: Mapping[str, Any]) -> None:
    """Write a small JSON file atomically. Another attempt at the same task may write the same file.

    **Arguments**

    - `path`: path of the file.
    - `what`: its content.
    """
    draft = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
    with writing(path):
        draft.write_text(json.dumps(what))
        os.replace(draft, path)


def heard(folder: Path, begin: str = "") -> dict[str, Any]:
    """Return what tasks have written, by the name of the file.

    **Arguments**

    - `folder`: folder to read from.
    - `begin`: prefix of the names to read.
    """
    names = sorted(name for name in os.listdir(folder) if name.startswith(begin) and not name.startswith("."))
    return {name: json.loads((folder / name).read_text()) for name in names}


@dataclass(frozen=True)
class Read:
    """The first step: reads stretches of the data, and yields their rows as frames by bucket.

    **Arguments**

    - `files`: all rows.
    - `shape`: what to write.
    - `stretches`: where each stretch begins and ends; a task is the number of one.
    - `buckets`: number of buckets; each frame belongs to one.
    - `seconds`: length of a partition; None if there is only one.
    - `load`: bytes of rows to read at once.
    - `most`: most bytes of a frame, unless one row has more.
    - `schema`: serialized schema of the rows.
    - `told`: folder in which tasks report the rows they have read, and errors.
    """

    files: Files
    shape: WrittenColumns
    stretches: Sequence[tuple[RowPosition, RowPosition | None]]
    buckets: int
    seconds: float | None
    load: int
    most: int
    schema: bytes
    told: Path

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                with telling(self.told, task):
                    yield from _together(self._frames(task))

    def _frames(self, task: int) -> Iterator[tuple[Any, ...]]:
        begin, end = self.stretches[task]
        files = replace(self.files, dataset=self.files.dataset.anew(), begin=begin, end=end)
        rows = number = 0
        for table in loads(files, self.shape, self.load, _schema_of(self.schema)):
            if heard(self.told, REFUSED):
                return
            here = ordered(table, partitions_of(keys_of(table)[1], self.seconds))
            for frame in (frame for *_, frames in framed(here, self.most, self.buckets) for frame in frames):
                said = frame.bucket, frame.partition, len(frame.keys), len(frame.packed)
                keys = frame.keys.tobytes()
                yield task, number, *said, keys, b"".join([frame.record(0, 0), keys, frame.packed.data])
                number += 1
            rows += len(table)
            tell(self.told / f"{READING}-{task:06}", {"rows": rows})
        tell(self.told / f"{DONE}-{task:06}", {"rows": rows, "bad": files.bad_rows, "first": files.first_bad_row})


@dataclass(frozen=True)
class Count:
    """Counts sessions and the sizes of buckets, from the sort keys of frames. A bucket's frames must be contiguous.

    **Arguments**

    - `shape`: what to write.
    - `seconds`: length of a partition; None if there is only one.
    - `most`: bytes of memory for sort keys at once.
    """

    shape: WrittenColumns
    seconds: float | None
    most: int

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for bucket, rows in _by(batches, "bucket"):
            with tempfile.TemporaryDirectory(prefix="skirl-") as folder:
                cells: dict[int, list[int]] = {}
                with Spill(Path(folder)) as spill:
                    for row in rows:
                        spill.put(row["partition"], row["keys"])
                        own = cells.setdefault(row["partition"], [row["partition"], bucket, 0, 0])
                        own[2] += row["rows"]
                        own[3] += row["size"]
                    told = spill.close(lasting=False)
                with closing(Spilled(Path(folder), told, "")) as spilled:
                    counts = sessions_in(Stretch(spilled, None, ALL, None, self.most), self.shape, self.seconds)
            yield _told({"cells": list(cells.values()), **counts})


@dataclass(frozen=True)
class Gathered:
    """A task on the rows of a unit, whose frames must be contiguous.

    **Arguments**

    - `shape`: what to write.
    - `plan`: the units, and what was measured on the first.
    - `schema`: serialized schema of the rows.
    - `told`: folder in which tasks report errors.
    - `then`: what to tell the user to do if a frame is damaged.
    """

    shape: WrittenColumns
    plan: Mapping[str, Any]
    schema: bytes
    told: Path
    then: str

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, rows in _by(batches, "unit"):
            with telling(self.told, number), tempfile.TemporaryDirectory(prefix="skirl-") as folder:
                with Spill(Path(folder)) as spill:  # on disk, since the rows may not fit in memory
                    for row in rows:
                        spill.put_whole(row["frame"])
                    told = spill.close(lasting=False)
                with closing(Spilled(Path(folder), told, self.then)) as spilled:
                    packing = packing_of(_schema_of(self.schema))
                    stretch = Stretch(spilled, None, ALL, packing, self.plan["most"])
                    yield _told(self.done(number, stretch, Path(folder)))

    def done(self, number: int, stretch: Stretch, folder: Path) -> dict[str, Any]:
        """Process a unit, and return the result to report.

        **Arguments**

        - `number`: number of the unit.
        - `stretch`: its rows.
        - `folder`: folder for temporary files.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Measure(Gathered):
    """Finds the columns that repeat, and those to write with a dictionary, from the first unit."""

    def done(self, number: int, stretch: Stretch, folder: Path) -> dict[str, Any]:
        return measured(stretch, self.shape, folder, self.plan["most"])


@dataclass(frozen=True)
class Finish(Gathered):
    """The second step: sorts the rows of a unit and writes their file.

    **Arguments**

    - `parts`: folder of the files.
    - `drafts`: folder on the same disk for files that are not complete.
    """

    parts: Path
    drafts: Path

    def done(self, number: int, stretch: Stretch, folder: Path) -> dict[str, Any]:
        path = part_of(self.parts, number, self.plan)
        draft = self.drafts / f"{path.name}-{socket.gethostname()}-{os.getpid()}"
        finish(stretch, number, path, draft, self.shape, self.plan)
        return {"unit": number}


def _schema_of(raw: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(raw))


def _together(frames: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
    """Yield frames in batches."""
    waiting: list[tuple[Any, ...]] = []
    held = 0
    for frame in frames:
        waiting.append(frame)
        held += len(frame[-1])
        if held >= TOGETHER:
            yield _batch(FRAMES, waiting)
            waiting, held = [], 0
    if waiting:
        yield _batch(FRAMES, waiting)


def _told(what: Mapping[str, Any]) -> Any:
    return _batch(TOLD, [(json.dumps(what),)])


def _batch(columns: Mapping[str, str], rows: Sequence[tuple[Any, ...]]) -> Any:
    kinds = [pa.field(name, _KINDS[kind]) for name, kind in columns.items()]
    arrays = [pa.array(values, field.type) for values, field in zip(zip(*rows), kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(kinds))


def _by(batches: Iterator[Any], name: str) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    """Group consecutive rows with the same number in column `name`. Binary values are not copied."""

    def rows() -> Iterator[dict[str, Any]]:
        for batch in batches:
            for k in range(len(batch)):
                yield {field: _value(batch.column(n)[k]) for n, field in enumerate(batch.schema.names)}

    return groupby(rows(), lambda row: row[name])


def _value(scalar: Any) -> Any:
    return scalar.as_buffer() if pa.types.is_binary(scalar.type) else scalar.as_py()
