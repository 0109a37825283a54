"""Writes a sorted bucket as a Parquet file: finds the lists to leave out and the encodings of columns, and makes writers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from skirl.data.files.columnar import KEY, SLICE
from skirl.data.files.columns import one
from skirl.data.files.schema import FileSchema
from skirl.tools.jit import kernel

LIKELY = 1.1
"""Leave out the repeated lists of a column if it then has fewer ids by at least this factor, in the first bucket."""
RUN = "run"
DICTIONARY = 16 << 20
"""Most bytes of a column's dictionary: enough for the distinct ids of most row groups of 65,536 rows, unlike the 1 MiB at
which writers stop by default."""


def changed(column: Any, new: np.ndarray) -> np.ndarray:
    """Return where a list differs from the one in the row above, or a session begins (bool [n]).

    **Arguments**

    - `column`: an Arrow list array without nulls.
    - `new`: bool [n]: where sessions begin.
    """
    out = new.copy()
    offsets = column.offsets.to_numpy()
    _compare(offsets, column.values.to_numpy(zero_copy_only=False), out)
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


def groups_found(table: Any, schema: FileSchema, new: np.ndarray) -> dict[str, list[str]]:
    """Return groups of list columns to leave out where they repeat: those that change together, by their column of runs.

    **Arguments**

    - `table`: rows in order.
    - `schema`: schema of the file.
    - `new`: bool: where sessions begin.
    """
    patterns: dict[bytes, list[str]] = {}
    for spec in schema.ids:
        if not spec.list:
            continue
        column = one(table.column(spec.name))
        own = changed(column, new)
        sizes = np.diff(column.offsets.to_numpy())
        if sizes.sum() >= LIKELY * max(1, sizes[own].sum()):
            patterns.setdefault(np.packbits(own).tobytes(), []).append(spec.name)
    taken = set(table.column_names)
    free = (name for n in range(1, 1 << 20) if (name := f"{RUN}_{n}" if n > 1 else RUN) not in taken)
    return {next(free): names for names in patterns.values()}


def with_runs(schema: FileSchema, groups: Mapping[str, Sequence[str]]) -> FileSchema:
    """Return the schema of a file that leaves lists out.

    **Arguments**

    - `schema`: schema of the rows.
    - `groups`: columns that are left out together, by the name of their column of runs.
    """
    runs = {name: run for run, names in groups.items() for name in names}
    return replace(schema, ids=tuple(replace(spec, run=runs.get(spec.name, "")) for spec in schema.ids))


def once(table: Any, groups: Mapping[str, Sequence[str]], new: np.ndarray) -> Any:
    """Return the rows with null in place of lists that equal those of the row above, and with columns of runs.

    **Arguments**

    - `table`: a row group in order; it begins with a session.
    - `groups`: columns that are left out together, by the name of their column of runs.
    - `new`: bool: where sessions begin.
    """
    for run, names in groups.items():
        columns = {name: one(table.column(name)) for name in names}
        written = np.logical_or.reduce([changed(column, new) for column in columns.values()])
        for name, column in columns.items():
            sizes = np.diff(column.offsets.to_numpy()) * written
            offsets = np.zeros(len(sizes) + 1, np.int32)
            np.cumsum(sizes, out=offsets[1:])
            values = column.filter(pa.array(written)).flatten()
            some = pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(~written))
            table = table.set_column(table.column_names.index(name), pa.field(name, some.type), some)
        table = table.append_column(pa.field(run, pa.int32()), pa.array(runs_of(written)))
    return table


def runs_of(written: np.ndarray) -> np.ndarray:
    """Return how many rows above each row its list is stored (int32 [n]).

    >>> runs_of(np.array([True, False, False, True])).tolist()
    [0, 1, 2, 0]
    """
    rows = np.arange(len(written))
    return (rows - np.maximum.accumulate(np.where(written, rows, 0))).astype(np.int32)


def measured(table: Any, compression: str, folder: Path) -> list[str]:
    """Return the columns that are smaller with a dictionary than without.

    **Arguments**

    - `table`: the first rows, in the form in which they are written.
    - `compression`: compression of the file.
    - `folder`: folder for trial files.
    """
    sizes = []
    path = folder / "trial.parquet"
    for dictionary in (True, False):
        given = {"compression": compression, "dictionary_pagesize_limit": DICTIONARY, "use_dictionary": dictionary}
        with pq.ParquetWriter(path, table.schema, **given) as writer:
            writer.write_table(table, row_group_size=SLICE)
        meta = pq.ParquetFile(path).metadata
        sizes.append({})
        for group in range(meta.num_row_groups):
            for k in range(meta.num_columns):
                chunk = meta.row_group(group).column(k)
                of = chunk.path_in_schema
                sizes[-1][of] = sizes[-1].get(of, 0) + chunk.total_compressed_size
    path.unlink()
    return [of for of, size in sizes[0].items() if size < sizes[1][of]]


class Writer(pq.ParquetWriter):
    """Writes tables, cast to the schema of its file."""

    def write_table(self, table: Any, row_group_size: int | None = None) -> None:
        """Write one or more row groups."""
        super().write_table(table.cast(self.schema), row_group_size)


def writer_of(path: Path, schema: pa.Schema, of: FileSchema, compression: str, dictionaries: list[str]) -> Any:
    """Return the writer of a file; `with` closes it.

    **Arguments**

    - `path`: path of the file.
    - `schema`: Arrow schema of the rows.
    - `of`: schema to store in the file.
    - `compression`: compression of pages.
    - `dictionaries`: columns to write with a dictionary.
    """
    schema = pa.schema([_all_there(field) for field in schema], {KEY: of.toml().encode()})
    given = {
        "compression": compression,
        "dictionary_pagesize_limit": DICTIONARY,
        "use_dictionary": dictionaries or False,
    }
    return Writer(path, schema, **given)


def _all_there(field: Any) -> Any:
    """Declare the ids of a list field non-null: pages then store less per id, and are read in five sixths of the time."""
    kind = field.type
    if not pa.types.is_list(kind):
        return field
    return field.with_type(pa.list_(kind.value_field.with_nullable(False)))
