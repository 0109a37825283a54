"""Writes data files as a folder of Parquet files by session. DuckDB sorts the rows; `OUT` appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from skirl.data.files.stream import Files
from skirl.dedup import spark
from skirl.dedup.layout import row_groups, write_files
from skirl.dedup.sessions import KEYS, CannotSort, Columns, Sessions, keyed, physical, restored, shaped
from skirl.store.disk.os_files import NAME, Lock
from skirl.tools.flags import WrongFlags
from skirl.tools.os_errors import writing
from skirl.tools.progress import Report, progress_of
from skirl.tools.sealed_json import sync_folder
from skirl.tools.units import size

OF_A_THREAD = 128 << 20
"""Bytes of memory that a thread of DuckDB needs: with less, it fails where fewer threads would not."""


def convert_by_session(
    files: Files,
    out: str,
    request: Sessions,
    *,
    memory: int = 1 << 30,
    session: Any = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write the rows of files to the folder `out`, and return the result."""
    files, columns = shaped(files, request)
    folder = Path(out).resolve()
    work = folder.with_name(f"{folder.name}.unfinished")
    for path in files.dataset.paths:
        if {folder, work} & {*Path(path).resolve().parents}:
            raise ValueError(f"out is {out!r}, the folder that {path} is read from: name another")
    with _working(folder, work, force):
        with writing(work):
            (work / "parts").mkdir()
        with progress_of("convert") as progress:
            if session is None:
                found = _sorted(files, columns, work, memory, progress)
            else:
                found = spark.write_by_session(session, files, columns, work)
        sync_folder(work / "parts")
        with writing(folder):
            if folder.exists():
                os.rename(folder, work / "replaced")
            os.rename(work / "parts", folder)
            sync_folder(folder.parent)
    parts = sorted(folder.iterdir())
    return found | {"files": len(parts), "bytes": sum(part.stat().st_size for part in parts)}


def _sorted(files: Files, columns: Columns, work: Path, memory: int, progress: Report) -> dict[str, Any]:
    """Have DuckDB sort the rows, and write them. Return counts."""
    read, written, facts = 0, 0, {"read": "no rows"}

    def tables() -> Iterator[pa.Table]:
        nonlocal read
        for table in keyed(files, columns):
            yield table
            read += len(table)
            facts["read"] = f"{read:,} rows"
            progress(read + written, lambda: facts)
        if not read:
            raise ValueError(f"{files.dataset.paths[0]}: there are no rows to write: set data to files that have some")

    starts = columns.starts()
    groups = row_groups(in_order(tables(), work, memory), columns, starts)
    for _, _, rows in write_files(groups, columns, work / "parts"):
        written += rows
        facts["written"] = f"{written:,} rows"
        progress(read + written, lambda: facts)
    if written != read:
        raise CannotSort(f"DuckDB was given {read:,} rows and returned {written:,}: please report it")
    return {"samples": read, "sessions": starts.count, "bad_rows_skipped": files.bad_rows}


def in_order(tables: Iterator[pa.Table], folder: Path, memory: int) -> Iterator[pa.Table]:
    """Yield tables in the order of their sort keys. What does not fit in `memory` bytes DuckDB writes to `folder`."""
    import duckdb

    given: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for table in chain([first], tables):
                yield from physical(table).to_batches()
        except BaseException as error:  # DuckDB passes on only its text
            given.append(error)
            raise

    first = next(tables)
    reader = pa.RecordBatchReader.from_batches(physical(first).schema, batches())
    threads = max(1, min(os.cpu_count() or 1, memory // OF_A_THREAD))
    config = {"memory_limit": f"{memory}B", "temp_directory": str(folder / "spill"), "threads": threads}
    try:
        with duckdb.connect(config=config) as database:
            database.register("rows", reader)
            order = ", ".join(f'"{key}"' for key in KEYS)
            rows = database.execute(f"SELECT * FROM rows ORDER BY {order}")
            to_reader = getattr(rows, "to_arrow_reader", None) or rows.fetch_record_batch
            for batch in to_reader(2048):
                yield restored(pa.Table.from_batches([batch]), first.schema)
    except duckdb.OutOfMemoryException:
        raise CannotSort(f"DuckDB cannot sort the rows in {size(memory)}: set memory higher") from None
    except duckdb.Error as error:
        if given:
            raise given[0] from None
        with writing(folder):
            why = str(error).splitlines()[0][:300].rstrip(".")
            raise CannotSort(f"DuckDB cannot sort the rows ({why})") from error


@contextmanager
def _working(folder: Path, work: Path, force: bool) -> Iterator[None]:
    """Have an empty folder to work in, for this process alone. It is removed at the end, unless the process is killed."""
    if folder.exists() and not force:
        raise WrongFlags(f"out is {folder}, which already exists: name another folder, or add --force to replace it")
    with writing(work):
        work.mkdir(exist_ok=True)
    lock = Lock(work)
    try:
        for left in work.iterdir():
            if left.name != NAME:
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.release()
