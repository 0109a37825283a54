"""Converts data files to Parquet, which is read several times faster than text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from skirl.data.files.column import Encoded
from skirl.data.files.columnar import KEY, SLICE, parquet_at
from skirl.data.files.encode import Fingerprints
from skirl.data.files.find import BadSchema
from skirl.data.files.schema import Dense, FileSchema, Label, Text
from skirl.data.files.stream import Files
from skirl.tools.progress import progress_of


def convert(files: Files, out: str, compression: str, *, as_rows: bool) -> dict[str, Any]:
    """Write the samples of `files` to a Parquet file, and return counts for the result.

    as_rows: write ids as rows of their tables, otherwise as fingerprints.
    """
    files, schema, kept = as_written(files, as_rows)
    samples, about = 0, {KEY: schema.toml().encode()}
    with progress_of("convert") as progress, parquet_at(out, compression=compression) as write:
        for number, rows in enumerate(files.pieces(SLICE), start=1):
            write(table_of(rows, schema, list(kept)).replace_schema_metadata(about))
            samples += len(rows)
            progress(number, lambda n=samples: {"samples": f"{n:,}"})
        if not samples:
            raise ValueError(f"{out}: there are no rows to write: set data to files that have some")
    return {"samples": samples, "bad_rows_skipped": files.bad_rows, "bytes": Path(out).stat().st_size}


def as_written(files: Files, as_rows: bool) -> tuple[Files, FileSchema, dict[str, str]]:
    """The files with what is written of them, the schema of the converted file, and its unchanged columns."""
    if not as_rows:
        files = replace(files, encoder=replace(files.encoder, rows_of=Fingerprints()))
    schema, kept = converted(files.encoder.schema, files.encoder.rows if as_rows else None)
    return keeping(files, tuple(kept.values())), schema, kept


def keeping(files: Files, columns: tuple[str, ...], *, all_there: bool = False) -> Files:
    """The same files with `columns` kept besides what training reads; all_there: a row that lacks one is malformed."""
    wider = replace(files.encoder.schema, also=columns)
    encoder = replace(files.encoder, schema=wider, all_there=all_there)
    return replace(files, dataset=replace(files.dataset, schema=wider), encoder=encoder)


def converted(schema: FileSchema, rows: Any) -> tuple[FileSchema, dict[str, str]]:
    """The schema of a converted file, and its unchanged columns: the name in the source file by the new name."""
    dense = [Dense(name) for name in schema.dense_names]
    ids = []
    for column in schema.ids:
        table = column.table or column.name
        form: dict[str, Any] = {"type": "fingerprint", "of": column.kind}
        if column.encode == "row" or rows is not None:
            form = {"type": "int", "of": "", "encode": "row", "rows": (rows or {}).get(table, column.rows)}
        ids.append(replace(column, column="", separator="", run="", **form))
    labels = tuple(Label(label.name, label.kind) for label in schema.labels)
    names = [column.name for column in (*labels, *dense, *ids)]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise BadSchema(
            f"two columns would be written under the name {twice[0]!r}: give one another name in the schema"
        )
    kept: dict[str, str] = {}
    called: dict[str, Any] = {}
    for what in ("session", "time"):
        if (column := getattr(schema, what)) is not None:
            # Keep the column's name, unless a feature has it: features are not written as they were read.
            free = [name for name in (column, what, f"{column} as read") if name not in names]
            called[what] = next((name for name, its in kept.items() if its == column), free[0])
            kept[called[what]] = column
            names.append(called[what])
    return FileSchema(
        labels, tuple(dense), tuple(ids), **called, time_unit=schema.time_unit, missing=("",), text=Text()
    ), kept


def table_of(rows: Encoded, schema: FileSchema, kept_names: list[str]) -> Any:
    """Rows, with a list for each, as an Arrow table with the columns of a converted file."""
    arrays = [pa.array(rows.labels[:, k]) for k in range(len(schema.labels))]
    arrays += [pa.array(np.ascontiguousarray(rows.dense[:, k])) for k in range(len(schema.dense))]
    for column in (ids.expanded() for ids in rows.ids):
        if (offsets := column.offsets) is None:
            arrays.append(pa.array(column.values))
            continue
        values = column.values[offsets[0] : offsets[-1]]
        begins = (offsets - offsets[0]).astype(np.int32)
        arrays.append(pa.ListArray.from_arrays(pa.array(begins), pa.array(values)))
    names = [*(column.name for column in (*schema.labels, *schema.dense, *schema.ids)), *kept_names]
    return pa.table(dict(zip(names, [*arrays, *rows.kept], strict=True)))
