"""`skirl convert`: data files as Parquet that is read several times faster than text.

Dense columns are written as they enter a model, float32 after their transform. Ids are written as rows of their tables
with --rows or --vocab (4 bytes each), else as fingerprints (8 bytes), which any --rows or --vocab turns into the same rows
as those of the original files. Malformed rows never get there. The schema is in the file's metadata, so that
`--data parquet:OUT` needs no other. Row groups have 65,536 rows: a part that is read at once.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skirl.data.files.errors import BadSchema
from skirl.data.files.schema import Dense, FileSchema, Label, Text
from skirl.data.flags import DataFlags, check_in_and_out
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress, clock, size


@dataclass(frozen=True)
class Convert:
    """Flags of `skirl convert`."""

    data: str
    """The files: criteo:PATH, avazu:PATH, csv:PATH or parquet:PATH, as for `skirl train`."""
    out: str
    """The Parquet file to write."""
    _: KW_ONLY
    rows: str | None = None
    """Write ids as rows of tables of this size, as for `skirl train`; as fingerprints if neither this nor vocab is set."""
    vocab: str | None = None
    """Write ids as rows of this vocabulary."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    compression: Literal["none", "snappy", "lz4", "zstd"] = "none"
    """What pages are packed with: none is read fastest, zstd is smallest."""
    workers: int = 0
    """Processes that read files; 0: this one does."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse, or leave the row out and count it."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_in_and_out(self.data, self.out)

    def run(self) -> dict[str, Any]:
        """Read everything, write it anew."""
        from skirl.data.files.encode import Fingerprints
        from skirl.data.open import open_files

        started = time.monotonic()
        files = open_files(
            DataFlags(
                self.data,
                rows=self.rows,
                vocab=self.vocab,
                schema=self.schema,
                workers=self.workers,
                bad_rows=self.bad_rows,
            )
        )
        as_rows = self.rows is not None or self.vocab is not None
        if not as_rows:
            files = replace(files, encoder=replace(files.encoder, rows_of=Fingerprints()))
        schema = converted(files.encoder.schema, files.encoder.rows if as_rows else None)
        samples = 0
        with Progress("convert", steps=None, to=sys.stderr if self.json else sys.stdout, quiet=self.quiet) as progress:
            for number, rows in enumerate(write(self.out, schema, files.pieces(), self.compression), start=1):
                samples += rows
                facts = {"samples": f"{samples:,}"}
                progress(number, lambda facts=facts: facts)
        return {
            "command": "convert",
            **asdict(self),
            "samples": samples,
            "bad_rows_skipped": files.bad_rows,
            "bytes": Path(self.out).stat().st_size,
            "seconds": time.monotonic() - started,
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "failed": None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        skipped = result["bad_rows_skipped"]
        return {
            "written": f"{result['samples']:,} samples in {clock(result['seconds'])}, {size(result['bytes'])}"
            + (f"; {skipped:,} malformed rows were left out" if skipped else ""),
            "saved": f"{self.out}; train with --data parquet:{self.out}",
        }


def converted(schema: FileSchema, rows: Any) -> FileSchema:
    """The schema of a converted file. rows: of each table, None where ids are fingerprints."""
    dense = []
    for column in schema.dense:
        dense.append(Dense(column.name))
        if column.indicator:
            dense.append(Dense(f"{column.name} is missing"))
    ids = []
    for column in schema.ids:
        table = column.table or column.name
        form: dict[str, Any] = {"type": "fingerprint", "of": column.kind}
        if column.encode == "row" or rows is not None:
            form = {"type": "int", "of": "", "encode": "row", "rows": (rows or {}).get(table, column.rows)}
        ids.append(replace(column, column="", separator="", **form))
    labels = tuple(Label(label.name, label.kind) for label in schema.labels)
    names = [column.name for column in (*labels, *dense, *ids)]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise BadSchema(
            f"two columns would be written under the name {twice[0]!r}: give one another name in the schema, and set "
            "its column to what it is called in the file"
        )
    time_, missing = schema.time, ("",)
    if time_ is not None and time_ not in {c.name for c in (*labels, *dense, *ids)}:
        time_ = None
    if schema.time is not None and any(c.column in ("", schema.time) and c.name == schema.time for c in schema.dense):
        time_ = None  # what is written under this name is no time any more
    return FileSchema(labels, tuple(dense), tuple(ids), time=time_, missing=missing, text=Text())


def write(path: str, schema: FileSchema, pieces: Iterator[Any], compression: str) -> Iterator[int]:
    """Write encoded pieces; the rows of each row group when it is written. The file is there when it is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from skirl.data.files.columnar import KEY, SLICE
    from skirl.data.files.stream import cut, joined

    unfinished = f"{path}.{os.getpid()}.part"
    writer: Any = None
    kept: list[Any] = []
    rows = 0

    def group() -> int:
        nonlocal writer, rows, kept
        whole = joined(kept)
        now, later = cut(whole, 0, min(SLICE, rows)), cut(whole, min(SLICE, rows), rows)
        arrays = [pa.array(now.labels[:, k]) for k in range(len(schema.labels))]
        arrays += [pa.array(np.ascontiguousarray(now.dense[:, k])) for k in range(len(schema.dense))]
        for values, sizes in zip(now.ids, now.lengths):
            array = pa.array(values)
            if sizes is not None:
                offsets = np.zeros(len(sizes) + 1, np.int32)
                np.cumsum(sizes, out=offsets[1:])
                array = pa.ListArray.from_arrays(pa.array(offsets), array)
            arrays.append(array)
        names = [column.name for column in (*schema.labels, *schema.dense, *schema.ids)]
        table = pa.table(dict(zip(names, arrays, strict=True)), metadata={KEY: schema.toml().encode()})
        if writer is None:
            writer = pq.ParquetWriter(unfinished, table.schema, compression=compression, use_dictionary=False)
        writer.write_table(table, row_group_size=len(now))
        kept, rows = [later] if len(later) else [], len(later)
        return len(now)

    try:
        for piece in pieces:
            if len(piece):
                kept.append(piece)
                rows += len(piece)
            while rows >= SLICE:
                yield group()
        if rows:
            yield group()
        if writer is None:
            raise ValueError(f"{path}: there is no row to write: give more files")
        writer.close()
        os.replace(unfinished, path)
    finally:
        if writer is not None:
            writer.close()
        Path(unfinished).unlink(missing_ok=True)
