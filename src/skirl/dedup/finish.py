"""Writes a stretch of rows in order as a file: cuts it into row groups, and leaves out lists that repeat."""

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
from skirl.dedup.frames import KEYS
from skirl.dedup.order import SessionStarts, groups_of_rows, sessions_named
from skirl.dedup.stretch import Stretch
from skirl.dedup.window_layout import windows, windows_found, with_windows
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

TRIED = 1 << 16
"""Rows on which encodings and groups are measured."""
LARGEST_GROUP = 1 << 30
"""Most bytes of a row group, however much memory there is: offsets of lists and texts have 31 bits."""


class ListLayout(NamedTuple):
    """A way to write lists that repeat."""

    found: Callable[[Any, FileSchema, np.ndarray], dict[str, list[str]]]
    """Returns the list columns to write this way, by the name of their column of runs, for rows in order."""
    lay: Callable[[Any, Mapping[str, Sequence[str]], np.ndarray], Any]
    """Returns a row group in the form in which it is written."""
    schema: Callable[[FileSchema, Mapping[str, Sequence[str]]], FileSchema]
    """Returns the schema of the written file."""


LAYOUTS = {
    "rows": ListLayout(lambda *_: {}, lambda table, *_: table, lambda schema, _: schema),
    "once": ListLayout(layouts.groups_found, layouts.once, layouts.with_runs),
    "window": ListLayout(windows_found, windows, with_windows),
}


@dataclass(frozen=True)
class WrittenColumns:
    """Which columns of the rows to write, and how."""

    schema: FileSchema
    """Schema of the files, before lists are left out."""
    kept: Mapping[str, str]
    """Columns that are written unchanged: the name in the source by the name in the file."""
    columns: tuple[str, ...]
    """Further columns to read: that of the session or the user, and that of the time."""
    time: str | None
    named: str
    """The session column to add if only users are known; "" if there is one already."""
    gap: float | None
    layout: str
    compression: str


def with_keys(table: Any, hashes: np.ndarray, times: np.ndarray) -> Any:
    """Return a table of rows with their sort keys added as columns.

    **Arguments**

    - `table`: the rows.
    - `hashes`: uint64 [n, 2], hashes of sessions or users.
    - `times`: float64 [n].
    """
    for name, array in zip(KEYS, (hashes[:, 0].copy(), hashes[:, 1].copy(), np.ascontiguousarray(times)), strict=True):
        table = table.append_column(name, pa.array(array))
    return table


def keys_of(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the sort keys of a table: hashes (uint64 [n, 2]) and times (float64 [n]).

    **Arguments**

    - `rows`: a table with the columns that `with_keys` adds.
    """
    high, low, times = (rows.column(name).to_numpy() for name in KEYS)
    return np.stack([high, low], axis=1), times


def finish(
    stretch: Stretch, number: int, path: Path, draft: Path, shape: WrittenColumns, plan: Mapping[str, Any]
) -> None:
    """Sort the rows of a unit and write its file. The file appears at `path` only when complete.

    **Arguments**

    - `stretch`: the rows.
    - `number`: number of the unit.
    - `path`: path of the file.
    - `draft`: where to write it until it is complete, on the same disk.
    - `shape`: what to write.
    - `plan`: the units, and what `measured` returned.
    """
    writer: Any = None
    rows, layout = 0, LAYOUTS[shape.layout]
    of = layout.schema(shape.schema, plan["groups"])
    with writing(path):
        for table, new in row_groups(stretch, shape, plan["most"]):
            rows += len(table)
            table = layout.lay(table, plan["groups"], new)
            if writer is None:
                writer = layouts.writer_of(draft, table.schema, of, shape.compression, plan["dictionaries"])
            writer.write_table(table, row_group_size=max(1, len(table)))
        if rows != plan["unit_rows"][number]:
            raise stretch.spilled.lost(rows, plan["unit_rows"][number])
        writer.close()
        with draft.open("rb+") as file:
            to_disk(file)
        os.replace(draft, path)
    pa.default_memory_pool().release_unused()


def row_groups(stretch: Stretch, shape: WrittenColumns, most: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield row groups in order, each of at most `most` / 4 bytes, with a bool array of where sessions or the group begin.

    **Arguments**

    - `stretch`: the rows.
    - `shape`: what to write.
    - `most`: bytes of rows to sort at once.
    """
    starts, name = SessionStarts(shape.gap), 0
    left, new, sizes = None, np.empty(0, bool), np.empty(0, np.int64)
    for piece in stretch.pieces():
        held, own = len(new), starts.begun(piece.hashes, piece.times)
        named = sessions_named(piece.hashes, piece.times, own, name) if shape.named else np.empty(0, np.int64)
        name = int(named[-1]) if shape.named else 0
        new, sizes = np.concatenate([new, own]), np.concatenate([sizes, piece.sizes])
        cuts = groups_of_rows(new, SLICE, sizes, min(most // 4, LARGEST_GROUP))
        for low, high in pairwise(cuts):
            parts = [] if left is None or low >= held else [left.slice(low, min(high, held) - low)]
            if high > held:
                first, end = max(low, held) - held, high - held
                rows = pa.Table.from_batches([piece.taken(first, end)])
                parts.append(rows.append_column(shape.named, pa.array(named[first:end])) if shape.named else rows)
            table = parts[0] if len(parts) == 1 else pa.concat_tables(parts).combine_chunks()
            if high < len(new):
                yield table, _group(new[low:high])
            else:
                left, new, sizes = table, new[low:], sizes[low:]  # the next piece may have more rows of this group
    if left is not None:
        yield left, _group(new)


def _group(new: np.ndarray) -> np.ndarray:
    """Mark the first row of a group as the beginning of a session, since a group begins with whole rows."""
    new = new.copy()
    new[:1] = True
    return new


def measured(stretch: Stretch, shape: WrittenColumns, folder: Path, most: int) -> dict[str, Any]:
    """Find the columns that repeat, and those to write with a dictionary, from the first row group of the first file.

    **Arguments**

    - `stretch`: the rows of that file.
    - `shape`: what to write.
    - `folder`: folder for trial files.
    - `most`: bytes of rows to sort at once.
    """
    table, new = next(row_groups(stretch, shape, most))
    layout = LAYOUTS[shape.layout]
    groups = layout.found(table, shape.schema, new)
    table = layout.lay(table, groups, new)
    return {"groups": groups, "dictionaries": layouts.measured(table, shape.compression, folder)}
