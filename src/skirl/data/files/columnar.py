"""Reads Parquet files in parts of at most 65,536 rows: a row group, or a slice of a larger one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from skirl.data.files.columns import is_date, is_list, is_text, kinds_of, one, pc
from skirl.data.files.encode import Raw
from skirl.data.files.find import BadFile, BadSchema, no_column
from skirl.data.files.hashing import GOOD
from skirl.data.files.schema import FileSchema
from skirl.tools.os_errors import replacing, writing

SLICE = 1 << 16
BUFFER = 1 << 17
"""Bytes of a column to read at once. They stay in the processor's cache until they are decoded, as whole columns do not."""
KEY, KEY_OF_PREDICTIONS = b"skirl.schema", b"skirl.predictions"
"""Keys in the Arrow schema's metadata: the file's schema, and what `skirl predict` made its predictions from, as JSON."""
DAMAGED = (pa.ArrowException, OSError, ValueError, OverflowError)


class ParquetFile:
    """A Parquet file: row groups, read in slices. Where lists are left out, groups are read as a whole: only the first row
    of one is sure to store its lists."""

    def __init__(self, path: str, schema: FileSchema, slice_rows: int = SLICE) -> None:
        self.path, self._schema = path, schema
        try:
            self._file: Any = pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=BUFFER)
            meta, stored = self._file.metadata, self._file.schema_arrow
            groups = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
            _ = stored.names, [str(kind) for kind in stored.types]  # Arrow reads names lazily, so errors show up here
        except DAMAGED as error:
            raise self._damaged(f"is damaged or cut off ({short(error)})") from None
        check_runs(path, stored, schema)
        check_columns(path, stored, schema)
        whole = any(column.run for column in schema.ids)
        self._slice = [max(1, rows) if whole else slice_rows for rows in groups]  # rows a part, for each group
        self._parts = [
            (group, first, min(self._slice[group], rows - first))
            for group, rows in enumerate(groups)
            for first in range(0, rows, self._slice[group])
        ]
        """For each part: its group, its first row in the group, and its number of rows."""
        self._going: tuple[int, int, Iterator[Any]] | None = None
        """A group, the row in it that comes next, and the iterator over slices that yields it."""

    def close(self) -> None:
        self._file = self._going = None

    def has(self, part: int) -> bool:
        return part < len(self._parts)

    def share(self, part: int) -> int:
        return self._parts[part][0]

    def rows(self, part: int) -> int:
        return self._parts[part][2]

    def read(self, part: int) -> Raw:
        group, first, there = self._parts[part]
        try:
            table = self._read(part)
            columns = {name: table.column(name) for name in self._schema.needed}
        except DAMAGED as error:
            raise self._damaged(f"row group {group + 1:,} cannot be read ({short(error)})") from None
        if table.num_rows != there:
            raise self._damaged(f"row group {group + 1:,} has fewer rows than its header says")
        if wrong := share_lists(columns, self._schema):
            row, found = wrong
            raise self._damaged(f"row {row + 1:,} of row group {group + 1:,} {found}")
        where = f" of row group {group + 1:,}"
        return Raw(columns, np.arange(there), self.path, lambda row: f"row {first + row + 1:,}{where}", [])

    def _read(self, part: int) -> Any:
        """The slice of a part. Going back within a group reads the group again from its start."""
        group, first, _ = self._parts[part]
        at, row, slices = self._going or (-1, 0, iter(()))
        if at != group or row > first:
            row, slices = 0, self._slices(group)
        table = None
        while row <= first:
            table, row = next(slices, None), row + self._slice[group]
            if table is None:
                raise ValueError("it ends early")
        follows = part + 1 < len(self._parts) and self._parts[part + 1][0] == group
        self._going = (group, row, slices) if follows else None
        return table

    def _damaged(self, found: str) -> BadFile:
        return BadFile(self.path, found, "get it again, or write it again")

    def _slices(self, group: int) -> Iterator[Any]:
        names = list(self._schema.needed)
        rows = self._slice[group]
        if self._file.metadata.row_group(group).num_rows <= rows:
            yield self._file.read_row_group(group, columns=names, use_threads=False)
            return
        left = None
        for batch in self._file.iter_batches(rows, row_groups=[group], columns=names, use_threads=False):
            table = pa.Table.from_batches([batch])
            left = table if left is None else pa.concat_tables([left, table])
            while left is not None and left.num_rows >= rows:  # Arrow may end a batch early
                yield left.slice(0, rows)
                left = left.slice(rows) if left.num_rows > rows else None
        if left is not None:
            yield left


def check_columns(path: str, stored: pa.Schema, schema: FileSchema) -> None:
    lists = {column.column or column.name for column in schema.ids if column.list}
    others = {label.name for label in schema.labels} | {column.column or column.name for column in schema.ids}
    others |= {column.column or column.name for column in schema.dense if column.transform != "hour"}
    for name in schema.needed:
        at = stored.get_all_field_indices(name)
        if len(at) != 1:
            what = no_column(name, stored.names) if not at else f"{len(at)} columns {name!r}"
            raise _misfit(path, f"it has {what}", "name the column in the schema as the file does")
        kind = stored.field(at[0]).type
        inner = kind.value_type if pt.is_dictionary(kind) or (is_list(kind) and name in lists) else kind
        if is_list(kind) and name not in lists:
            then = "write list = true under its [[id]] in the schema; other columns have one value a row"
            raise _misfit(path, f"column {name!r} holds lists", then)
        number = pt.is_integer(inner) or pt.is_floating(inner) or pt.is_boolean(inner) or pt.is_null(inner)
        if not (is_text(inner) or number or (is_date(inner) and name not in others)):
            then = "the schema takes texts, numbers, lists of them, and dates as the time or for its hour"
            raise _misfit(path, f"column {name!r} is of type {kind}", then)


def _misfit(path: str, found: str, then: str) -> BadSchema:
    return BadSchema(f"{path}: {found}: {then}")


def check_runs(path: str, stored: pa.Schema, schema: FileSchema) -> None:
    """Raise if a file stores lists otherwise than the schema says: those that it leaves out would be read as empty."""
    embedded = (stored.metadata or {}).get(KEY)
    if embedded is None:
        return
    try:
        written = {column.name: column for column in FileSchema.parse(embedded.decode("utf-8", "replace")).ids}
    except BadSchema as error:
        raise BadSchema(f"{path}: the schema in it {error}") from None
    for column in schema.ids:
        run = written.get(column.column or column.name, column).run
        if column.run and not run and column.run not in stored.names:
            found = f"lists of column {column.name!r} are stored otherwise than the schema or the first file says"
            raise _misfit(path, found, "convert all files of the data with one command")
        if run and run != column.run:
            raise BadSchema(
                f"{path}: column {column.name!r} leaves lists out that equal the row above's, as {run!r} says: write run = "
                f"{run!r} under its [[id]], or leave schema out for the one in the file"
            )


def share_lists(columns: dict[str, Any], schema: FileSchema) -> tuple[int, str] | None:
    """Replace list columns of a row group that leave lists out with dictionary arrays: each list once, an index per row.

    Lists that equal the one in the row above are null, and a column of runs says how many rows above each is stored.
    Return None, or the first wrong row and what was found in it.
    """
    for spec in schema.ids:
        if not spec.run:
            continue
        name = spec.column or spec.name
        lists, runs = (one(columns[of]) for of in (name, spec.run))
        if not (pt.is_list(lists.type) or pt.is_large_list(lists.type)) or not pt.is_integer(runs.type):
            return 0, f"has no list in column {name!r}, or no whole number in {spec.run!r}"
        if not len(lists):
            continue
        written = kinds_of(lists) == GOOD
        if not written[0]:
            return 0, f"leaves out the list of column {name!r}, but the first row of a row group must store it"
        said, above = (pc.fill_null(runs, -1) if runs.null_count else runs).to_numpy(), runs_of(written)
        if len(wrong := np.flatnonzero(said != above)):
            row = int(wrong[0])
            is_there = f"{above[row]:,} rows above" if above[row] else "in this row"
            return row, f"has {said[row]} in column {spec.run!r}, but the list of column {name!r} is stored {is_there}"
        inverse = (np.cumsum(written) - 1).astype(np.int32)
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(inverse), lists.drop_null(), safe=False)
    return None


def runs_of(written: np.ndarray) -> np.ndarray:
    """How many rows above each row its list is stored (int32 [n])."""
    rows = np.arange(len(written))
    return (rows - np.maximum.accumulate(np.where(written, rows, 0))).astype(np.int32)


def stored_schema(path: str) -> Any:
    """The Arrow schema of a Parquet file; None if it cannot be read, which is reported when its rows are."""
    try:
        return pq.read_schema(path)
    except DAMAGED:
        return None


def embedded_schema(path: str) -> str | None:
    raw = (getattr(stored_schema(path), "metadata", None) or {}).get(KEY)
    return None if raw is None else raw.decode("utf-8", "replace")


def short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


@contextmanager
def parquet_at(path: str | Path, **options: Any) -> Iterator[Callable[[pa.Table], None]]:
    """Write a Parquet file in this block, which gets tables, a row group each. It appears once it is complete."""
    writer: Any = None

    def write(table: pa.Table) -> None:
        nonlocal writer
        with writing(path):
            writer = writer or pq.ParquetWriter(draft, table.schema, use_dictionary=False, **options)
            writer.write_table(table.cast(writer.schema), row_group_size=len(table))

    with replacing(path) as draft:
        try:
            yield write
            with writing(path):
                writer.close()
        finally:
            with suppress(OSError):  # the error that matters has been raised already
                if writer is not None:
                    writer.close()
