"""Files of rows in order by session: row groups, lists that equal the row above's left out, encodings, and writers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY, SLICE, runs_of
from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.dedup.sessions import KEYS, Columns, SessionStarts
from skirl.tools.jit import kernel
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

DICTIONARY = 16 << 20
"""Most bytes of a column's dictionary: enough for the distinct ids of most row groups of 65,536 rows, unlike the 1 MiB at
which writers stop by default."""
GROUP_BYTES = 64 << 20
"""Most bytes of a row group before lists are left out, give or take what arrives at once,"""
FILE_BYTES = 256 << 20
"""and bytes after which a file ends."""
_BEGINS = "~begins"


class Group(NamedTuple):
    table: Any
    """Its rows without sort keys."""
    new: np.ndarray
    """bool: where sessions begin."""
    partition: int


def row_groups(tables: Iterable[Any], columns: Columns, starts: SessionStarts) -> Iterator[Group]:
    """Yield the row groups of rows in order, which begin at sessions. Only a session too large for a group is divided."""
    left, partition = None, 0
    for table in tables:
        keys = [table.column(name).to_numpy() for name in KEYS]
        new = starts.begun(keys)
        rows = table.drop_columns(list(KEYS))
        if columns.named:
            rows = rows.append_column(columns.named, pa.array(starts.named(keys, new)))
        rows = rows.append_column(_BEGINS, pa.array(new))
        borders = [0, *(np.flatnonzero(np.diff(keys[0])) + 1).tolist(), len(rows)]
        for low, high in pairwise(borders):
            if left is not None and keys[0][low] != partition:
                yield _group(left, partition)
                left = None
            partition, more = int(keys[0][low]), rows.slice(low, high - low)
            left = more if left is None else pa.concat_tables([left, more])
            while len(left) > SLICE or (left.nbytes > GROUP_BYTES and len(left) > 1):
                begins = np.flatnonzero(left.column(_BEGINS).to_numpy()[: SLICE + 1])
                end = (int(begins[-1]) if len(begins) else 0) or min(SLICE, len(left) - 1)
                yield _group(left.slice(0, end), partition)
                left = left.slice(end)
    if left is not None:
        yield _group(left, partition)


def _group(rows: Any, partition: int) -> Group:
    new = rows.column(_BEGINS).to_numpy().copy()
    new[:1] = True  # a group begins with a whole row
    return Group(rows.drop_columns([_BEGINS]).combine_chunks(), new, partition)


def changed(column: Any, new: np.ndarray) -> np.ndarray:
    """Return where a list differs from the one in the row above, or a session begins (bool [n]). new: the latter alone."""
    out = new.copy()
    _compare(column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False), out)
    return out


@kernel
def _compare(offsets, values, out):
    """Set `out` to True for rows whose list differs from the one in the row above."""
    for i in range(1, out.size):
        before, begin, end = offsets[i - 1], offsets[i], offsets[i + 1]
        if begin - before != end - begin:
            out[i] = True
        k = 0
        while not out[i] and k < end - begin:
            if values[before + k] != values[begin + k]:
                out[i] = True
            k += 1


def with_runs(schema: FileSchema) -> FileSchema:
    """Return the schema of a file that leaves lists out: with a column of runs for each column of lists."""
    taken = {column.name for column in (*schema.labels, *schema.dense, *schema.ids)} | {schema.session, schema.time}
    ids = []
    for column in schema.ids:
        run = f"run of {column.name}"
        while run in taken:
            run += "_"
        ids.append(replace(column, run=run) if column.list else column)
    return replace(schema, ids=tuple(ids))


def once(table: Any, schema: FileSchema, new: np.ndarray) -> Any:
    """Return a row group with null in place of lists that equal those of the row above, if they have a column of runs."""
    for spec in schema.ids:
        if not spec.run:
            continue
        column = one(table.column(spec.name))
        written = changed(column, new)
        offsets = np.zeros(len(written) + 1, np.int32)
        np.cumsum(np.diff(column.offsets.to_numpy()) * written, out=offsets[1:])
        values = column.filter(pa.array(written)).flatten()
        some = pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~written))
        table = table.set_column(table.column_names.index(spec.name), pa.field(spec.name, some.type), some)
        table = table.append_column(pa.field(spec.run, pa.int32()), pa.array(runs_of(written)))
    return table


def dictionaries_for(table: Any, compression: str) -> list[str]:
    """Return the columns of rows, in the form in which they are written, that are smaller with a dictionary."""
    sizes: list[dict[str, int]] = []
    for dictionary in (True, False):
        out = pa.BufferOutputStream()
        given: Any = {"compression": compression, "dictionary_pagesize_limit": DICTIONARY, "use_dictionary": dictionary}
        with pq.ParquetWriter(out, table.schema, **given) as writer:
            writer.write_table(table, row_group_size=SLICE)
        group = pq.ParquetFile(pa.BufferReader(out.getvalue())).metadata.row_group(0)
        chunks = [group.column(k) for k in range(group.num_columns)]
        sizes.append({chunk.path_in_schema: chunk.total_compressed_size for chunk in chunks})
    return [of for of, size in sizes[0].items() if size < sizes[1][of]]


class Writer(pq.ParquetWriter):
    """Writes tables with the columns `schema` to a file that says how to read them, `of`."""

    def __init__(
        self, path: Any, schema: pa.Schema, of: FileSchema, compression: str, dictionaries: Sequence[str]
    ) -> None:
        schema = pa.schema([_all_there(field) for field in schema], {KEY: of.toml().encode()})
        given: Any = {"compression": compression, "dictionary_pagesize_limit": DICTIONARY}
        super().__init__(path, schema, **given, use_dictionary=list(dictionaries) or False)  # type: ignore[arg-type]

    def write_table(self, table: Any, row_group_size: int | None = None) -> None:
        super().write_table(table.cast(self.schema), row_group_size)


def _all_there(field: Any) -> Any:
    """Declare the ids of a list field non-null: pages then store less per id, and are read in five sixths of the time."""
    kind = field.type
    return field.with_type(pa.list_(kind.value_field.with_nullable(False))) if pa.types.is_list(kind) else field


def write_files(
    groups: Iterator[Group], columns: Columns, folder: Path, stem: str = "part"
) -> Iterator[tuple[Path, int, int]]:
    """Write row groups to files named `stem`-NUMBER.parquet. Yield the path, partition and rows of each group written.

    A file has rows of one partition of time, and is on the disk when the next one begins.
    """
    of = with_runs(columns.schema) if columns.request.layout == "once" else columns.schema
    compression, dictionaries, writer = columns.request.compression, None, None
    path, partition, held, number = folder, 0, 0, 0
    try:
        for group in groups:
            table = once(group.table, of, group.new)
            if dictionaries is None:
                dictionaries = dictionaries_for(table, compression)
            if writer is not None and (group.partition != partition or held >= FILE_BYTES):
                _close(writer, path)
                writer = None
            if writer is None:
                path, partition, held = folder / f"{stem}-{number:05}.parquet", group.partition, 0
                number += 1
                with writing(path):
                    writer = Writer(path, table.schema, of, compression, dictionaries)
            with writing(path):
                writer.write_table(table, row_group_size=max(1, len(table)))
            held += group.table.nbytes
            yield path, partition, len(table)
        if writer is not None:
            _close(writer, path)
            writer = None
    finally:
        if writer is not None:
            with suppress(OSError):  # the error that matters has been raised already
                writer.close()


def _close(writer: Writer, path: Path) -> None:
    with writing(path):
        writer.close()
        with path.open("rb+") as file:
            to_disk(file)
