"""How the rows of some buckets are put in order and written as a file."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from skirl.data.files.columnar import SLICE
from skirl.data.files.encoded import gather_from
from skirl.data.files.schema import FileSchema
from skirl.dedup import layout as layouts
from skirl.dedup.order import begins, by_session, groups_of_rows, sessions_named
from skirl.dedup.packed import Packing
from skirl.dedup.spill import KEYS, Bucket, Frame
from skirl.dedup.window_layout import windows, windows_found, with_windows
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

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
    """Hashes and times of a table.

    **Arguments**

    - `rows`: with what they are ordered by.
    """
    high, low, times = (rows.column(name).to_numpy() for name in KEYS)
    return np.stack([high, low], axis=1), times


class Unit:
    """The rows of some buckets in one partition.

    **Arguments**

    - `buckets`: they are closed with it.
    - `partition`: which stretch of time.
    - `packing`: how rows lie in them.
    - `most`: bytes of rows that are held at once; where a unit has more, frames are read for each row group.
    """

    def __init__(self, buckets: Sequence[Bucket], partition: int, packing: Packing, most: int) -> None:
        self._buckets, self._packing = buckets, packing
        self._frames: list[tuple[Bucket, Frame]] = [
            (bucket, frame) for bucket in buckets for frame in bucket.frames if frame.partition == partition
        ]
        self.rows = sum(frame.rows for _, frame in self._frames)
        self.bytes = sum(frame.bytes for _, frame in self._frames)
        self._holds = self.bytes <= most
        self._held: np.ndarray | None = None
        self._sizes = self._begins = np.empty(0, np.int64)
        """Bytes of each row, and where it begins when all lie one after the other."""

    def rows_of_group(self, most: int, least: int) -> int:
        """Rows of a row group at most: a quarter of what is sorted at once.

        **Arguments**

        - `most`: bytes of rows that are sorted at once.
        - `least`: rows that are enough, however few bytes they have.
        """
        return int(min(least, max(1, most * self.rows // (4 * max(1, self.bytes)))))

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """Hashes and times of all rows."""
        hashes, times, sizes = np.empty((self.rows, 2), np.uint64), np.empty(self.rows), np.empty(self.rows, np.int64)
        at = 0
        for bucket, frame in self._frames:
            own = slice(at, at := at + frame.rows)
            hashes[own, 0], hashes[own, 1], times[own], sizes[own] = bucket.keys(frame)
        self._sizes, self._begins = sizes, np.cumsum(sizes) - sizes
        return hashes, times

    def taken(self, rows: np.ndarray) -> Any:
        """These rows, in this order, without what they are ordered by: a table; after `keys`.

        **Arguments**

        - `rows`: int64: which, counted over all.
        """
        if not self._holds:
            return pa.Table.from_batches([self._gathered(rows)])
        if self._held is None:
            self._held = np.empty(sum(frame.length for _, frame in self._frames), np.uint8)
            at = 0
            for bucket, frame in self._frames:
                bucket.read(frame, self._held[at : at + frame.length])
                at += frame.length
        return pa.Table.from_batches([self._packing.columns(self._held, self._begins[rows])])

    def _gathered(self, rows: np.ndarray) -> Any:
        """The same out of the frames that have some of them."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        begins, sizes = self._begins[ascending], self._sizes[ascending]
        places = np.cumsum(sizes) - sizes
        out = np.empty(int(sizes.sum()), np.uint8)
        first = before = at = 0
        for bucket, frame in self._frames:
            first += frame.rows
            end = int(np.searchsorted(ascending, first))
            if end > at:
                held = np.empty(frame.length, np.uint8)
                bucket.read(frame, held)
                gather_from(held, begins[at:end] - before, sizes[at:end], out[places[at] :])
            before, at = before + frame.length, end
        back = np.empty(len(rows), np.int64)
        back[order] = places
        return self._packing.columns(out, back)

    def close(self) -> None:
        """Let the files go."""
        for bucket in self._buckets:
            bucket.close()


def finish(unit: Unit, path: Path, draft: Path, shape: Shape, plan: Mapping[str, Any]) -> None:
    """Put the rows of a unit in order, and write them; the file is there when it is complete.

    **Arguments**

    - `unit`: the rows.
    - `path`: of the file.
    - `draft`: where it is until then, on the same disk.
    - `shape`: what is written.
    - `plan`: what `planned` found.
    """
    writer: Any = None
    of = LAYOUTS[shape.layout].schema(shape.schema, plan["groups"])
    with writing(path):
        for table in _row_groups(unit, shape, plan):
            if writer is None:
                writer = layouts.writer_of(draft, table.schema, of, shape.compression, plan["dictionaries"])
            writer.write_table(table, row_group_size=max(1, len(table)))
        writer.close()
        with draft.open("rb+") as file:
            to_disk(file)
        os.replace(draft, path)
    pa.default_memory_pool().release_unused()


def _row_groups(unit: Unit, shape: Shape, plan: Mapping[str, Any]) -> Iterator[Any]:
    """Tables of whole sessions in order, as they are written."""
    hashes, times = unit.keys()
    order = by_session(hashes, times)
    hashes, times = hashes[order], times[order]
    new = begins(hashes, times, shape.gap)
    names = sessions_named(hashes, times, new) if shape.named else None
    del hashes, times
    cuts = groups_of_rows(new, unit.rows_of_group(plan["most"], SLICE))
    for low, high in pairwise(cuts):
        table = unit.taken(order[low:high])
        if names is not None:
            table = table.append_column(shape.named, pa.array(names[low:high]))
        yield LAYOUTS[shape.layout].lay(table, plan["groups"], new[low:high])


def measured(unit: Unit, shape: Shape, most: int, folder: Path) -> dict[str, Any]:
    """Which columns repeat, and which have a dictionary: found on the first row group of the first file.

    **Arguments**

    - `unit`: the rows of that file.
    - `shape`: what is written.
    - `most`: bytes of rows that are sorted at once.
    - `folder`: where to try.
    """
    hashes, times = unit.keys()
    order = by_session(hashes, times)
    new = begins(hashes[order], times[order], shape.gap)
    cuts = groups_of_rows(new, unit.rows_of_group(most, TRIED))
    table, new = unit.taken(order[: cuts[1]]), new[: cuts[1]]
    layout = LAYOUTS[shape.layout]
    groups = layout.found(table, shape.schema, new)
    table = layout.lay(table, groups, new)
    return {"groups": groups, "dictionaries": layouts.measured(table, shape.compression, folder)}
