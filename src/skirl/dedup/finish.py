"""From buckets of rows to files: which buckets make a file, and how one is put in order and written."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from skirl.data.files.columnar import SLICE
from skirl.data.files.schema import FileSchema
from skirl.dedup import layout as layouts
from skirl.dedup.order import (
    begins,
    buckets_of,
    by_session,
    groups_of_rows,
    partitions_of,
    sessions_named,
    too_long,
)
from skirl.dedup.spill import Bucket, Frame, Spill
from skirl.dedup.window_layout import windows, windows_found, with_windows
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import sync_folder, to_disk

KEYS = ("~high", "~low", "~time")
"""Columns that rows are ordered by; no file has them."""
TRIED = 1 << 16
"""Rows that encodings and groups are measured on."""


class Layout(NamedTuple):
    """How lists that repeat are written."""

    found: Callable[[Any, FileSchema, np.ndarray], dict[str, list[str]]]
    """Which columns are, of rows in order: by the name of the column that says so."""
    lay: Callable[[Any, Mapping[str, Sequence[str]], np.ndarray], Any]
    """A row group as it is written."""
    schema: Callable[[FileSchema, Mapping[str, Sequence[str]]], FileSchema]
    """What the file says of itself."""


LAYOUTS = {
    "rows": Layout(lambda *_: {}, lambda table, *_: table, lambda schema, _: schema),
    "once": Layout(layouts.groups_found, layouts.once, layouts.with_runs),
    "window": Layout(windows_found, windows, with_windows),
}


@dataclass(frozen=True)
class Shape:
    """What is written of the rows, and how."""

    schema: FileSchema
    """Of the files, but for what they leave out."""
    kept: Mapping[str, str]
    """Columns that are written as they were read, by the names that they get."""
    columns: tuple[str, ...]
    """Columns that are read besides: of the session or the user, and of the time."""
    time: str | None
    named: str
    """The column that is added for sessions of users; "" where they have one."""
    gap: float | None
    layout: str
    compression: str


def with_keys(table: Any, hashes: np.ndarray, times: np.ndarray) -> Any:
    """A table of rows with what they are ordered by.

    **Arguments**

    - `table`: the rows.
    - `hashes`: uint64 [n, 2], of sessions or users.
    - `times`: float64 [n].
    """
    for name, array in zip(KEYS, (hashes[:, 0].copy(), hashes[:, 1].copy(), np.ascontiguousarray(times)), strict=True):
        table = table.append_column(name, pa.array(array))
    return table


def keys_of(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and times of a table or a batch.

    **Arguments**

    - `rows`: with what they are ordered by.
    """
    high, low, times = (rows.column(name).to_numpy() for name in KEYS)
    return np.stack([high, low], axis=1), times.copy()  # where rows lie on disk, that is let go


def spilled(spill: Spill, table: Any, buckets: int, seconds: float | None) -> None:
    """Write rows to their buckets.

    **Arguments**

    - `spill`: where to.
    - `table`: the rows, with what they are ordered by.
    - `buckets`: how many.
    - `seconds`: of a partition; None: there is one.
    """
    hashes, times = keys_of(table)
    spill.add(table, buckets_of(hashes, buckets), partitions_of(times, seconds))


def plan(work: Path, shape: Shape, manifest: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Which stretches of buckets make a file each, in order of time; what was counted, and measured on the first.

    **Arguments**

    - `work`: the folder of the command.
    - `shape`: what is written.
    - `manifest`: what is in the buckets.
    - `most`: bytes of rows that are sorted at once.
    """
    held: dict[int, dict[int, int]] = {}
    counts = {"sessions": 0, "cut_at_borders": 0, "cut_as_too_long": 0}
    for number in range(len(manifest["sizes"])):
        bucket = _bucket(work, manifest, number)
        for frame in bucket.frames:
            of = held.setdefault(frame.partition, {})
            of[number] = of.get(number, 0) + frame.bytes
        _count(bucket, shape, counts)
        bucket.close()
    units: list[tuple[int, int, int]] = []
    for partition in sorted(held):
        first, total = -1, 0
        for number, size in sorted(held[partition].items()):
            if first >= 0 and total + size > most:
                units.append((partition, first, number))
                first = -1
            first, total = (number, size) if first < 0 else (first, total + size)
        units.append((partition, first, len(manifest["sizes"])))
    found = {"units": units, "most": most, **counts, "groups": {}, "dictionaries": []}
    return found | _measured(work, shape, {**manifest, **found})


def _count(bucket: Bucket, shape: Shape, counts: dict[str, int]) -> None:
    """Count the sessions of a bucket, and those that are cut."""
    if not bucket.frames:
        return
    batches = [keys_of(bucket.read(frame)) for frame in bucket.frames]
    hashes, times = (np.concatenate(each) for each in zip(*batches))
    partitions = np.repeat([f.partition for f in bucket.frames], [f.rows for f in bucket.frames])
    order = by_session(hashes, times)
    hashes, times, partitions = hashes[order], times[order], partitions[order]
    uncut = begins(hashes, times, shape.gap, longest=len(times) + 1)
    borders = np.zeros(len(times), bool)
    borders[1:] = partitions[1:] != partitions[:-1]
    inside = np.add.reduceat((borders & ~uncut).astype(np.int64), np.flatnonzero(uncut))
    at_borders = uncut | borders
    new = begins_within(at_borders)
    counts["cut_at_borders"] += int((inside > 0).sum())
    counts["cut_as_too_long"] += too_long(new, at_borders)
    counts["sessions"] += int(new.sum())


def begins_within(begun: np.ndarray) -> np.ndarray:
    """Where sessions begin when those that are too long are cut.

    **Arguments**

    - `begun`: bool [n]: where they begin without.
    """
    of = np.cumsum(begun).astype(np.uint64)
    return begins(np.stack([of, of], axis=1), np.zeros(len(begun)), None)


def finish(work: Path, shape: Shape, manifest: Mapping[str, Any]) -> Iterator[int]:
    """Write the files that are not there yet; how many rows are done, after each.

    **Arguments**

    - `work`: the folder of the command.
    - `shape`: what is written.
    - `manifest`: what is in the buckets, and the plan.
    """
    parts = work / "parts"
    done = 0
    width = len(str(len(manifest["units"])))
    for number, unit in enumerate(manifest["units"]):
        path = parts / f"part-{number:0{max(5, width)}}.parquet"
        unit_of_rows = _Unit(work, manifest, *unit)
        try:
            done += unit_of_rows.rows
            if not path.is_file():
                _write(unit_of_rows, path, shape, manifest)
        finally:
            unit_of_rows.close()
        yield done
    sync_folder(parts)


class _Unit:
    """The rows of some buckets in one partition."""

    def __init__(self, work: Path, manifest: Mapping[str, Any], partition: int, first: int, end: int) -> None:
        self._buckets = [_bucket(work, manifest, number) for number in range(first, end)]
        self._frames: list[tuple[Bucket, Frame]] = [
            (bucket, frame) for bucket in self._buckets for frame in bucket.frames if frame.partition == partition
        ]
        self.rows = sum(frame.rows for _, frame in self._frames)
        self.bytes = sum(frame.bytes for _, frame in self._frames)

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and times of all rows."""
        found = [keys_of(bucket.read(frame)) for bucket, frame in self._frames]
        hashes, times = zip(*found)
        return np.concatenate(hashes), np.concatenate(times)

    def taken(self, rows: np.ndarray) -> Any:
        """These rows, in this order, without what they are ordered by: a table."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        pieces, first, at = [], 0, 0
        for bucket, frame in self._frames:
            end = int(np.searchsorted(ascending, first + frame.rows))
            if end > at:
                pieces.append(bucket.read(frame).drop_columns(KEYS).take(pa.array(ascending[at:end] - first)))
            first, at = first + frame.rows, end
        whole = pa.Table.from_batches(pieces).combine_chunks()
        del pieces
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return whole.take(pa.array(back)).combine_chunks()

    def close(self) -> None:
        for bucket in self._buckets:
            bucket.close()


def _write(unit: _Unit, path: Path, shape: Shape, manifest: Mapping[str, Any]) -> None:
    """Put the rows in order, and write them; the file is there when it is complete."""
    draft = path.with_suffix(".part")
    writer: Any = None
    of = LAYOUTS[shape.layout].schema(shape.schema, manifest["groups"])
    with writing(path):
        for table in _row_groups(unit, shape, manifest):
            if writer is None:
                writer = layouts.writer_of(draft, table.schema, of, shape.compression, manifest["dictionaries"])
            writer.write_table(table, row_group_size=max(1, len(table)))
        writer.close()
        with draft.open("rb+") as file:
            to_disk(file)
        os.replace(draft, path)
    pa.default_memory_pool().release_unused()


def _row_groups(unit: _Unit, shape: Shape, manifest: Mapping[str, Any]) -> Iterator[Any]:
    """Tables of whole sessions in order, as they are written."""
    hashes, times = unit.keys()
    order = by_session(hashes, times)
    hashes, times = hashes[order], times[order]
    new = begins(hashes, times, shape.gap)
    names = sessions_named(hashes, times, new) if shape.named else None
    del hashes, times
    most = int(min(SLICE, max(1, manifest["most"] * unit.rows // (4 * max(1, unit.bytes)))))
    cuts = groups_of_rows(new, most)
    for low, high in pairwise(cuts):
        table = unit.taken(order[low:high])
        if names is not None:
            table = table.append_column(shape.named, pa.array(names[low:high]))
        yield LAYOUTS[shape.layout].lay(table, manifest["groups"], new[low:high])


def _measured(work: Path, shape: Shape, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Which columns repeat, and which have a dictionary: found on the first row group of the first file."""
    unit = _Unit(work, manifest, *manifest["units"][0])
    try:
        hashes, times = unit.keys()
        order = by_session(hashes, times)
        new = begins(hashes[order], times[order], shape.gap)
        cuts = groups_of_rows(new, int(min(TRIED, max(1, manifest["most"] * unit.rows // (4 * max(1, unit.bytes))))))
        table, new = unit.taken(order[: cuts[1]]), new[: cuts[1]]
        layout = LAYOUTS[shape.layout]
        groups = layout.found(table, shape.schema, new)
        table = layout.lay(table, groups, new)
        return {"groups": groups, "dictionaries": layouts.measured(table, shape.compression, work)}
    finally:
        unit.close()


def _bucket(work: Path, manifest: Mapping[str, Any], number: int) -> Bucket:
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(manifest["rows_schema"])))
    then = f"remove {work}, and run the command again"
    return Bucket(work / "spill", number, manifest["sizes"][number], schema, then)
