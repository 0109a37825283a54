"""What processes of a cluster do for `skirl convert`: functions of Arrow batches, as Spark's `mapInArrow` calls them.

Rows travel as frames, many in one binary value: no engine's types come between, and none has to know ours.
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

from skirl.data.files.dataset import Place
from skirl.data.files.stream import Files
from skirl.dedup.finish import Shape, finish, keys_of, measured
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
"""Columns of frames: task and number say where its rows come in the data; keys is what they are ordered by."""
TOLD = {"told": "string"}
"""A column of JSON."""
_KINDS = {"int": pa.int32(), "bigint": pa.int64(), "binary": pa.binary(), "string": pa.string()}
TOGETHER = 8 << 20
"""Bytes of frames in a batch, unless one has more."""
READING, DONE, REFUSED = "reading", "done", "refused"
"""How names of files begin that say what a task has read so far, and in the end, and why one has ended all."""


@contextmanager
def telling(folder: Path, task: int) -> Iterator[None]:
    """In this block an error that is a sentence is written down and not raised: a cluster would try again, and fail again.

    **Arguments**

    - `folder`: where to.
    - `task`: its number.
    """
    try:
        yield
    except (ValueError, NotWritten) as error:
        tell(folder / f"{REFUSED}-{task:06}", {"text": str(error), "errno": getattr(error, "errno", None)})


def tell(path: Path, what: Mapping[str, Any]) -> None:
    """Write a small file, all at once; another attempt at the same task may do so too.

    **Arguments**

    - `path`: the file.
    - `what`: its content.
    """
    draft = path.with_name(f".{path.name}-{socket.gethostname()}-{os.getpid()}")
    with writing(path):
        draft.write_text(json.dumps(what))
        os.replace(draft, path)


def heard(folder: Path, begin: str = "") -> dict[str, Any]:
    """What tasks have told: by the name of the file.

    **Arguments**

    - `folder`: where from.
    - `begin`: of names.
    """
    names = sorted(name for name in os.listdir(folder) if name.startswith(begin) and not name.startswith("."))
    return {name: json.loads((folder / name).read_text()) for name in names}


@dataclass(frozen=True)
class Read:
    """The bucket of a row: reads stretches of the data, and gives their rows as frames.

    **Arguments**

    - `files`: all rows.
    - `shape`: what is written of them.
    - `stretches`: where each begins and ends; a task is the number of one.
    - `buckets`: how many; each frame is of one.
    - `seconds`: of a partition; None: there is one.
    - `load`: bytes of rows that are read at once.
    - `most`: bytes of a frame, unless one row has more.
    - `schema`: of the rows.
    - `told`: a folder: how many rows each task has read, and why one has ended.
    """

    files: Files
    shape: Shape
    stretches: Sequence[tuple[Place, Place | None]]
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
    """Sessions and sizes of buckets; a bucket's frames follow each other, without what is in them.

    **Arguments**

    - `shape`: what is written.
    - `seconds`: of a partition; None: there is one.
    - `most`: bytes of memory that keys take at once.
    """

    shape: Shape
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
    """What is done with the rows of a unit, whose frames follow each other.

    **Arguments**

    - `shape`: what is written.
    - `plan`: units, and what was found of the first.
    - `schema`: of the rows.
    - `told`: a folder: why one has ended.
    - `then`: what to do where a frame is damaged.
    """

    shape: Shape
    plan: Mapping[str, Any]
    schema: bytes
    told: Path
    then: str

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, rows in _by(batches, "unit"):
            with telling(self.told, number), tempfile.TemporaryDirectory(prefix="skirl-") as folder:
                with Spill(Path(folder)) as spill:  # on disk, for rows may be more than memory holds
                    for row in rows:
                        spill.put_whole(row["frame"])
                    told = spill.close(lasting=False)
                with closing(Spilled(Path(folder), told, self.then)) as spilled:
                    packing = packing_of(_schema_of(self.schema))
                    stretch = Stretch(spilled, None, ALL, packing, self.plan["most"])
                    yield _told(self.done(number, stretch, Path(folder)))

    def done(self, number: int, stretch: Stretch, folder: Path) -> dict[str, Any]:
        """What is told of a unit.

        **Arguments**

        - `number`: which.
        - `stretch`: its rows.
        - `folder`: a place for files that do not stay.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Measure(Gathered):
    """Which columns repeat, and which have a dictionary; the first unit says so."""

    def done(self, number: int, stretch: Stretch, folder: Path) -> dict[str, Any]:
        return measured(stretch, self.shape, folder, self.plan["most"])


@dataclass(frozen=True)
class Finish(Gathered):
    """The finish of a bucket: puts rows in order, and writes their file.

    **Arguments**

    - `parts`: the folder of files.
    - `drafts`: one on the same disk, for those that are not complete.
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
    """Batches of frames."""
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
    """Rows that follow each other and have the same number; binary values lie where they came."""

    def rows() -> Iterator[dict[str, Any]]:
        for batch in batches:
            for k in range(len(batch)):
                yield {field: _value(batch.column(n)[k]) for n, field in enumerate(batch.schema.names)}

    return groupby(rows(), lambda row: row[name])


def _value(scalar: Any) -> Any:
    return scalar.as_buffer() if pa.types.is_binary(scalar.type) else scalar.as_py()
