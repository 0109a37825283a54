"""How a stretch of rows in order is written as a file: its row groups, and what is left out of them."""

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
"""Rows that encodings and groups are measured on."""
LARGEST_GROUP = 1 << 30
"""Bytes of a row group at most, however much memory there is: offsets of lists and texts have 31 bits."""


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


def finish(stretch: Stretch, number: int, path: Path, draft: Path, shape: Shape, plan: Mapping[str, Any]) -> None:
    """Put the rows of a unit in order, and write them; the file is there when it is complete.

    **Arguments**

    - `stretch`: the rows.
    - `number`: that of the unit.
    - `path`: of the file.
    - `draft`: where it is until then, on the same disk.
    - `shape`: what is written.
    - `plan`: what `planned` found.
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


def row_groups(stretch: Stretch, shape: Shape, most: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Tables of rows in order, a quarter of what is sorted at once at most, and bool: where sessions begin, and the table.

    **Arguments**

    - `stretch`: the rows.
    - `shape`: what is written.
    - `most`: bytes of rows that are sorted at once.
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
                left, new, sizes = table, new[low:], sizes[low:]  # rows of the next piece may belong to it
    if left is not None:
        yield left, _group(new)


def _group(new: np.ndarray) -> np.ndarray:
    """Where sessions begin, and the group, which begins with whole rows."""
    new = new.copy()
    new[:1] = True
    return new


def measured(stretch: Stretch, shape: Shape, folder: Path, most: int) -> dict[str, Any]:
    """Which columns repeat, and which have a dictionary: found on the first row group of the first file.

    **Arguments**

    - `stretch`: the rows of that file.
    - `shape`: what is written.
    - `folder`: where to try.
    - `most`: bytes of rows that are sorted at once.
    """
    table, new = next(row_groups(stretch, shape, most))
    layout = LAYOUTS[shape.layout]
    groups = layout.found(table, shape.schema, new)
    table = layout.lay(table, groups, new)
    return {"groups": groups, "dictionaries": layouts.measured(table, shape.compression, folder)}
