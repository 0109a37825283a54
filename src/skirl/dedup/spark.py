"""Writes files by session with Apache Spark: it reads, moves and sorts the rows, and its tasks write the files."""

import json
import os
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from skirl.data.files.dataset import RowPosition
from skirl.data.files.stream import Files
from skirl.dedup.layout import row_groups, write_files
from skirl.dedup.sessions import KEYS, CannotSort, Columns, keyed, physical, restored
from skirl.tools.flags import WrongFlags

SHARE = 128 << 20
"""Bytes of the files for each partition of the shuffle."""
ROWS_OF_A_FILE = 1 << 40
"""More rows than a file has."""
SETTINGS = {
    "spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "2048",
}  # fmt: skip
"""Settings of our session: we report failures ourselves, and lists may be long."""
TYPES = {
    pa.bool_(): "boolean", pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int", pa.int64(): "bigint",
    pa.float32(): "float", pa.float64(): "double",
}  # fmt: skip


def write_by_session(spark: Any, files: Files, columns: Columns, work: Path) -> dict[str, Any]:
    """Write the rows of shaped files by session to `work`/parts, and return counts. All of Spark's processes see `work`."""
    work, paths = work.absolute(), list(map(os.path.abspath, files.dataset.paths))
    files = replace(files, dataset=replace(files.dataset, paths=paths))
    with closing(keyed(files, columns)) as tables:  # type: ignore[type-var]
        if (first := next(tables, None)) is None:
            raise ValueError(f"{paths[0]}: there are no rows to write: set data to files that have some")
    schema = first.schema
    for name in ("drafts", "read"):
        (work / name).mkdir()

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            part = replace(files, begin=RowPosition(number), end=RowPosition(number + 1))
            rows = 0
            for table in keyed(part, columns, number * ROWS_OF_A_FILE, schema):
                yield from physical(table).combine_chunks().to_batches()
                rows += len(table)
            found = {"rows": rows, "bad": part.bad_rows}
            draft = work / "read" / uuid.uuid4().hex
            draft.write_text(json.dumps(found))
            os.replace(draft, work / "read" / f"{number}.json")  # the same if a task runs again

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        stem, starts, sizes = uuid.uuid4().hex, columns.starts(), {}
        tables = (restored(pa.Table.from_batches([batch]), schema) for batch in batches if len(batch))
        groups = row_groups(tables, columns, starts)
        for path, partition, rows in write_files(groups, columns, work / "drafts", stem):
            sizes[path.name] = partition, sizes.get(path.name, (0, 0))[1] + rows
        yield pa.record_batch({"counts": [json.dumps({"files": sizes, "sessions": starts.count})]})

    by = [f"`{key}`" for key in KEYS]
    shuffled = 1 + sum(map(os.path.getsize, paths)) // SHARE
    rows = _mapped(spark.range(0, len(paths), 1, len(paths)), read, _columns_of(physical(first).schema))
    rows = rows.repartition(shuffled, by[1]).sortWithinPartitions(*by)
    tasks = _collected(_mapped(rows, write, "counts string"))
    done = [json.loads((work / "read" / f"{number}.json").read_text()) for number in range(len(paths))]
    written = [(part, n, name, rows) for n, t in enumerate(tasks) for name, (part, rows) in t["files"].items()]
    for number, (_, _, name, _) in enumerate(sorted(written)):
        os.rename(work / "drafts" / name, work / "parts" / f"part-{number:05}.parquet")
    read_rows, written_rows = sum(each["rows"] for each in done), sum(rows for *_, rows in written)
    if read_rows != written_rows:
        raise CannotSort(f"Spark was given {read_rows:,} rows and returned {written_rows:,}: please report it")
    return {
        "samples": read_rows, "sessions": sum(task["sessions"] for task in tasks),
        "bad_rows_skipped": sum(each["bad"] for each in done),
    }  # fmt: skip


@contextmanager
def session_at(master: str | None) -> Iterator[Any]:
    """Have a SparkSession at `master`, or at Spark's own default, which ends with the block."""
    if find_spec("pyspark") is None:
        raise WrongFlags("engine is 'spark', and pyspark is not installed: pip install 'skirl[spark]'")
    builder = import_module("pyspark.sql").SparkSession.builder.appName("skirl convert")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = builder if master is None else builder.master(master)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    ctrl_c = signal.getsignal(signal.SIGINT)  # a session replaces it, and does not put it back
    try:
        session = builder.getOrCreate()
    except Exception as error:
        then = "install Java 17 or later, or set master to a Spark that works"
        raise CannotSort(f"cannot start a Spark session ({_why(error)}): {then}") from None
    try:
        yield session
    finally:
        session.stop()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, ctrl_c)


def _mapped(frame: Any, function: Callable[[Iterator[Any]], Iterator[Any]], columns: str) -> Any:
    """Return a data frame with a function applied to the batches of each partition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyspark warns about the version of pandas, which we do not use
        return frame.mapInArrow(function, columns)


def _columns_of(schema: pa.Schema) -> str:
    def kind(of: Any) -> str:
        return f"array<{kind(of.value_type)}>" if pa.types.is_list(of) else TYPES.get(of) or str(of).replace("128", "")

    return ", ".join("`{}` {}".format(field.name.replace("`", "``"), kind(field.type)) for field in schema)


def _collected(frame: Any) -> list[Any]:
    """Return what the tasks of a data frame tell. Raise what one of them has refused."""
    try:
        return [json.loads(row[0]) for row in frame.collect()]
    except Exception as error:
        why = _why(error)
        if (refused := re.match(r"(?:skirl\.\S+|ValueError): (.*)", why)) is not None:
            raise ValueError(refused[1]) from None
        raise CannotSort(f"Spark has failed ({why[:300]}): fix that, and run the command again") from None


def _why(error: BaseException) -> str:
    """Return the reason of an error in one line: for a Python error, the line that its traceback ends with."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    begins = [n for n, line in enumerate(lines) if line.startswith(("Traceback (most", "  File "))]
    if begins:
        lines = [line for line in lines[begins[-1] + 1 :] if not line.startswith(" ")] or lines
    return lines[0].strip().rstrip(".")
