"""Writes files by session with Apache Spark: Spark moves frames of rows, and our own code reads and finishes them."""

import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from skirl.data.files.dataset import RowPosition
from skirl.data.files.find import kind_of
from skirl.data.files.stream import Files
from skirl.dedup.finish import WrittenColumns
from skirl.dedup.order import SessionStarts
from skirl.dedup.plan import Counts, buckets_for, part_of
from skirl.dedup.spill import HELD
from skirl.dedup.tasks import DONE, FRAMES, READING, REFUSED, TOLD, Count, Finish, Gathered, Measure, Read, heard
from skirl.dedup.wanted import Wanted, loads, sizes_of
from skirl.tools.flags import WrongFlags
from skirl.tools.os_errors import NotWritten, writing
from skirl.tools.progress import Progress
from skirl.tools.units import parse_seconds

STRETCH = 64 << 20
"""Bytes of files that a task reads,"""
TASKS = 8
"""unless there would be fewer tasks than this."""
POLL = 0.3
"""Seconds between two checks of the tasks' progress."""
PARTITIONS = 200
"""Most partitions of a shuffle."""
LARGEST = 1 << 20
"""Most bytes of a frame, unless one row has more."""
PACKED = 8
"""Typical compression ratio of text with gzip."""
SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "8",  # a record is a frame
    "spark.sql.parquet.enableVectorizedReader": "false",  # it holds 4,096 of them
}
OF_OWN = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "FATAL"}
"""Settings of a session of our own, where we report failures ourselves."""
FRAMES_FILE = {"compression": "none", "parquet.page.size.row.check.min": "1", "parquet.block.size.row.check.min": "1"}
"""Options of Spark's Parquet files, whose rows are frames."""


class SparkFailed(RuntimeError):
    """Raised if Spark fails; the message says why."""


class Spark:
    """Runs the two steps of a convert on a SparkSession: find the bucket of each row, and finish each bucket.

    **Arguments**

    - `master`: where to run, such as local[4], spark://HOST:7077 or sc://HOST; None for the active session, or Spark's
      own default.
    - `session`: an existing session to use and leave running; None uses `master`.
    """

    def __init__(self, master: str | None = None, session: Any = None) -> None:
        self._master, self._given = master, session
        self._session: Any = None
        self._own = False
        self._were: dict[str, str] = {}
        self._ctrl_c: Any = None
        """The SIGINT handler from before a session of our own, which replaces it to end its jobs and never restores it."""
        self._remote = (master or os.environ.get("SPARK_REMOTE", "")).startswith("sc://")
        if session is None:
            self._check()

    def _check(self) -> None:
        """Raise if a session cannot be started, because pyspark or Java is missing."""
        if find_spec("pyspark") is None:
            raise WrongFlags("engine is 'spark', and pyspark is not installed: pip install 'skirl[spark]'")
        if not self._remote and not _has_java():
            raise WrongFlags(
                "engine is 'spark', and there is no Java: install Java 17 or later, set JAVA_HOME to it, or set master to "
                "sc://HOST"
            )

    def __enter__(self) -> "Spark":
        self._session = self._given or self._found()
        self._were = {name: self._session.conf.get(name) for name in SETTINGS}
        for name, value in SETTINGS.items():
            self._session.conf.set(name, value)
        return self

    def _found(self) -> Any:
        """Return the active session, or a new one."""
        SparkSession = import_module("pyspark.sql").SparkSession
        active = SparkSession.getActiveSession()
        if active is not None and self._master is not None:
            raise WrongFlags(f"master is {self._master!r}, and a SparkSession is active: stop it, or leave master out")
        self._own = active is None
        return active or self._began(SparkSession.builder)

    def _began(self, builder: Any) -> Any:
        self._ctrl_c = signal.getsignal(signal.SIGINT)
        builder = builder.appName("skirl convert")
        if self._remote:
            builder = builder.remote(self._master or os.environ["SPARK_REMOTE"])
        else:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            if self._master is not None:
                builder = builder.master(self._master)
            for name, value in OF_OWN.items():
                builder = builder.config(name, value)
        try:
            return builder.getOrCreate()
        except Exception as error:
            raise SparkFailed(f"cannot start a Spark session ({_why(error)}): set master to one that works") from None

    def __exit__(self, *error: object) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        if self._own:
            session.stop()
            if self._ctrl_c is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, self._ctrl_c)
            return
        for name, value in self._were.items():
            session.conf.set(name, value)

    def spill(
        self, files: Files, shape: WrittenColumns, wanted: Wanted, work: Path, progress: Progress
    ) -> dict[str, Any]:
        """Have Spark read rows and write them as frames. Return counts, and the plan of the files to write.

        **Arguments**

        - `files`: the rows.
        - `shape`: what to write.
        - `wanted`: how to write it.
        - `work`: the command's working folder, which all processes of Spark must see.
        - `progress`: called with the number of rows.
        """
        work = work.absolute()
        files = replace(
            files, dataset=replace(files.dataset.anew(), paths=list(map(os.path.abspath, files.dataset.paths)))
        )
        told = _anew(work / "told")
        with closing(loads(files, shape, 1)) as some:  # type: ignore[type-var]
            first = next(some, None)
        if first is None:
            raise ValueError(f"{files.dataset.paths[0]}: there are no rows to write: set data to files that have some")
        schema = first.schema.serialize().to_pybytes()
        seconds = parse_seconds(wanted.partition) if wanted.partition else None
        tasks = stretches(files, max(TASKS, sum(map(os.path.getsize, files.dataset.paths)) // STRETCH))
        rows = self._session.range(0, len(tasks), 1, len(tasks))
        grid = buckets_for(grown(files), wanted.unit)
        while True:  # runs once, unless rows of other files take far more memory than those of the first
            read = Read(files, shape, tasks, grid, seconds, wanted.load, LARGEST, schema, _anew(work / "told"))
            writer = _mapped(rows, read, FRAMES).write.mode("overwrite").options(**FRAMES_FILE)
            for _ in self._running(lambda writer=writer: writer.parquet(_place(work)), told):
                samples = _rows_so_far(told)
                facts = {"rows": f"{samples:,}", "buckets": f"{grid:,}"}
                progress(samples, lambda facts=facts: facts)
            done = list(heard(told, DONE).values())
            counts, sessions = self._counted(work, Count(shape, seconds, wanted.unit), grid)
            plan = counts.planned(wanted.unit)
            if plan["buckets"] <= grid:
                break
            grid = plan["buckets"]
        found: dict[str, Any] = {
            "samples": sum(of["rows"] for of in done), "rows_schema": schema.hex(),
            "spilled_bytes": sum(path.stat().st_size for path in (work / "spill").iterdir()),
            "bad_rows_skipped": sum(of["bad"] for of in done),
            "first_bad_row": next((of["first"] for of in done if of["bad"]), None), "grid": grid,
        }  # fmt: skip
        found |= plan | sessions
        return found | self._gathered(Measure(**_of_gathered(work, shape, found)), work, found, [0])[0]

    def _counted(self, work: Path, count: Count, grid: int) -> tuple[Counts, dict[str, int]]:
        """Return the counts of rows by bucket, and those of sessions."""
        frames = self._session.read.parquet(_place(work)).select("bucket", "partition", "rows", "size", "keys")
        frames = frames.repartition(min(grid, PARTITIONS), "bucket").sortWithinPartitions("bucket")
        counts, sessions = Counts(), dict(SessionStarts(None).counts)
        for told in self._collected(_mapped(frames, count, TOLD), work / "told"):
            partitions, buckets, rows, sizes = np.array(told["cells"], np.int64).T
            counts.hold(partitions, buckets.astype(np.uint64) * np.uint64((1 << 64) // grid), rows, sizes)
            sessions = {name: of + told[name] for name, of in sessions.items()}
        return counts, sessions

    def finish(self, work: Path, shape: WrittenColumns, manifest: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """Have Spark write the files that do not exist yet. Yield, from time to time, the number of files and of their rows.

        **Arguments**

        - `work`: the command's working folder.
        - `shape`: what to write.
        - `manifest`: what `spill` returned.
        """
        work = work.absolute()
        _anew(work / "told")
        paths = [part_of(work / "parts", number, manifest) for number in range(len(manifest["units"]))]
        missing = [number for number, path in enumerate(paths) if not path.is_file()]
        if missing:
            of = _of_gathered(work, shape, manifest)
            finishing = self._frames_of(
                Finish(**of, parts=work / "parts", drafts=_anew(work / "drafts")), work, manifest, missing
            )
            for _ in self._running(finishing.collect, work / "told"):
                yield _there(paths, manifest)
        yield _there(paths, manifest)

    def _gathered(
        self, gathered: Gathered, work: Path, plan: Mapping[str, Any], units: list[int]
    ) -> list[dict[str, Any]]:
        return self._collected(self._frames_of(gathered, work, plan, units), work / "told")

    def _frames_of(self, gathered: Gathered, work: Path, plan: Mapping[str, Any], units: list[int]) -> Any:
        """Return a data frame of results for `units`. A unit's frames are contiguous, and in the order of the data."""
        of_each = plan["grid"] // plan["buckets"]
        wanted = [(p, first * of_each, end * of_each, n) for n in units for p, first, end in [plan["units"][n]]]
        of = self._session.createDataFrame(wanted, "of bigint, begin int, end int, unit int")
        frames = self._session.read.parquet(_place(work)).select("partition", "bucket", "task", "number", "frame")
        inside = (frames["partition"] == of["of"]) & (frames["bucket"] >= of["begin"]) & (frames["bucket"] < of["end"])
        frames = frames.join(of.hint("broadcast"), inside).select("unit", "task", "number", "frame")
        frames = frames.repartition(min(len(units), PARTITIONS), "unit").sortWithinPartitions("unit", "task", "number")
        return _mapped(frames, gathered, TOLD)

    def _collected(self, frame: Any, told: Path) -> list[dict[str, Any]]:
        import json

        running = self._running(frame.collect, told)
        while True:
            try:
                next(running)
            except StopIteration as ended:
                return [json.loads(row[0]) for row in ended.value]

    def _running(self, job: Callable[[], Any], told: Path) -> Generator[None, None, Any]:
        """Run a job, yield at intervals while it runs, and return its result. Raise what tasks have refused."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(job)
            try:
                while not future.done():
                    wait([future], POLL)
                    yield
            except BaseException:
                if self._own:
                    self.__exit__()
                raise
        for of in heard(told, REFUSED).values():
            raise NotWritten(of["text"], of["errno"]) if of["errno"] else ValueError(of["text"])
        try:
            return future.result()
        except Exception as error:
            raise SparkFailed(
                f"Spark has failed ({_why(error)}): fix that, and run the command again to go on"
            ) from None


def stretches(files: Files, most: int) -> list[tuple[RowPosition, RowPosition | None]]:
    """Cut the data into stretches of about equally many parts, in order, which can be read independently.

    **Arguments**

    - `files`: all rows.
    - `most`: number of stretches; there are fewer if the data cannot be cut as often.
    """
    dataset = files.dataset.anew()
    begins: list[RowPosition] = []
    for number, path in enumerate(dataset.paths):
        if kind_of(path) == "gzip":  # to read from its middle, one has to unpack everything before
            begins.append(RowPosition(number))
            continue
        share = None
        for part in dataset.parts(RowPosition(number), RowPosition(number + 1)):
            if part.share != share:
                begins.append(RowPosition(part.file, part.part))
            share = part.share
    dataset.close()
    each = -(-len(begins) // most)
    begins = begins[::each]
    return list(zip(begins, [*begins[1:], None], strict=True))


def grown(files: Files) -> int:
    """Estimate the bytes that all rows take in memory, from the first rows' ratio of memory to bytes in the file.

    **Arguments**

    - `files`: all rows; at least one.
    """
    paths = files.dataset.paths
    total, size = sum(map(os.path.getsize, paths)), os.path.getsize(paths[0])
    kind, dataset = kind_of(paths[0]), files.dataset.anew()
    with closing(files.pieces(expanded=False)) as pieces:  # type: ignore[type-var]
        first = next(piece for piece in pieces if len(piece))
    try:
        if kind in ("parquet", "arrow"):
            parts = dataset.parts(RowPosition(0), RowPosition(1))
            of = size * len(first) / max(1, sum(map(dataset.rows, parts)))
        else:
            of = min(size, dataset.part_bytes) / (PACKED if kind == "gzip" else 1)
    finally:
        dataset.close()
    return int(total * (sizes_of(first).sum() + HELD * len(first)) / max(1, of))


def _has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return Path(home, "bin", "java").exists() if home else shutil.which("java") is not None


def _anew(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        folder.mkdir()
    return folder


def _of_gathered(work: Path, shape: WrittenColumns, plan: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shape": shape, "plan": plan, "schema": bytes.fromhex(plan["rows_schema"]), "told": work / "told",
        "then": f"remove {work}, and run the command again",
    }  # fmt: skip


def _place(work: Path) -> str:
    return f"file://{work}/spill"


def _rows_so_far(told: Path) -> int:
    return sum(of["rows"] for of in heard(told, READING).values())


def _there(paths: list[Path], manifest: Mapping[str, Any]) -> tuple[int, int]:
    there = [path.is_file() for path in paths]
    return sum(there), sum(rows for rows, is_there in zip(manifest["unit_rows"], there) if is_there)


def _mapped(frame: Any, function: Callable[[Iterator[Any]], Iterator[Any]], columns: Mapping[str, str]) -> Any:
    """Return a data frame with a function applied to the batches of each partition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pyspark warns about the version of pandas, which we do not use
        columns_of_sql = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        return frame.mapInArrow(lambda batches: function(batches), columns_of_sql)


def _why(error: BaseException) -> str:
    """Return the reason of an error in one line: for a Python error, the line that its traceback ends with."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    begins = [n for n, line in enumerate(lines) if line.startswith(("Traceback (most", "  File "))]
    if begins:
        lines = [line for line in lines[begins[-1] + 1 :] if not line.startswith(" ")] or lines
    return lines[0].strip().rstrip(".")[:300]
