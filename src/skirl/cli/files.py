"""The commands about files: vocab, convert, analyze, export, import, info. Their work is imported only when they run."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.cli.show import ShowFlags, facts
from skirl.core import OptimizerName
from skirl.data.flags import DataFlags, check_files
from skirl.tools.flags import WrongFlags, check_out, flat_of, parsed
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import put_whole
from skirl.tools.units import parse_bytes, size

PART = 1 << 18
"""Bytes of text to read at a time: the rows in it may be many times as large."""
LEAST_MEMORY = 256 << 20
READ = ("samples", "seconds", "bad_rows_skipped")
_BY_SESSION = ("session", "user", "gap", "partition", "memory", "layout", "engine", "master")


@dataclass(frozen=True)
class FileFlags(ShowFlags):
    group: ClassVar[str] = ""

    data: str
    """The files to read: criteo:PATH, avazu:PATH, mind:PATH, csv:PATH or parquet:PATH, as for `skirl train`."""
    _: KW_ONLY
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of malformed rows: refuse the files, or leave the row out and count it."""

    def files(self, part_bytes: int | None = None, **more: Any) -> Any:
        flags = DataFlags(self.data, schema=self.schema, workers=self.workers, bad_rows=self.bad_rows, **more)
        return flags.files(part_bytes)


def timed(work: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """A command's `run` whose result also says what it took."""

    def run(self: Any) -> dict[str, Any]:
        started = time.monotonic()
        found = work(self)
        return {**found, "seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}

    return run


@dataclass(frozen=True)
class SessionFlags(FileFlags):
    _: KW_ONLY
    session: str | None = None
    """The column that says which rows belong together; the schema's session column if not given."""
    user: str | None = None
    """The column of users, if no column says the session: a session ends after --gap without a row."""
    gap: str | None = None
    """With --user: time without a row that ends a session, such as 30m. Times that are plain numbers count seconds."""


@dataclass(frozen=True)
class Schema(ShowFlags):
    group: ClassVar[str] = ""

    data: str
    """The files to draft a schema from: csv:PATH or parquet:PATH, as for `skirl train`, or the path alone."""
    label: str | None = None
    """The column to predict; if not given, the only one that holds 0 and 1, or of several the one named like a label."""

    out: Path | None = None
    """The file to write; if not given, the schema is printed."""
    force: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        if self.out is not None:
            check_out(self.out, self.force, ".toml")

    def run(self) -> dict[str, Any]:
        from skirl.data.files.draft import draft

        schema = draft(self.data, self.label)
        if self.out is not None:
            with writing(self.out):
                put_whole(self.out, schema.encode(), "new")
        return {"schema": schema}

    def summary(self, result: dict[str, Any]) -> dict[str, str] | str:
        return result["schema"].rstrip() if self.out is None else {"out": f"{self.out}; train with --schema {self.out}"}


@dataclass(frozen=True)
class Vocab(FileFlags):
    out: Path
    """The vocabulary file to write."""
    min_count: int = 10
    """Give an id a row of its own if it occurs at least this many times; all other ids share one row."""
    valid: str | None = None
    """The rows that training will hold out, as for `skirl train`; they are not counted."""
    force: bool = False
    """Replace the vocabulary file if it exists; runs that used it can then no longer be resumed."""

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count is {self.min_count}: set it to 1 or more")
        check_files(self.data, self.out)
        check_out(self.out, self.force, why=", and runs may need it")

    @timed
    def run(self) -> dict[str, Any]:
        from skirl.data.vocabulary.vocabulary import count

        # Held-out rows do not count: a vocabulary of them would leak.
        return count(self.files(valid=self.valid, vocab="open"), str(self.out), self.min_count)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = facts(result, *READ, "rows", "distinct", "peak_bytes")
        return lines | {"out": f"{self.out}; train with --vocab {self.out}"}


@dataclass(frozen=True)
class Convert(SessionFlags):
    out: Path
    """The Parquet file to write; with --by session, the folder."""
    by: Literal["session"] | None = None
    """Write a folder in which the rows of a session are contiguous; if not given, a file in the order of the data."""
    rows: str | None = None
    """Write ids as rows of tables of this size, as for `skirl train`; without it and --vocab, fingerprints are written."""
    vocab: str | None = None
    """Write ids as rows of this vocabulary."""
    compression: Literal["none", "snappy", "lz4", "zstd"] = "none"
    """How to compress pages: none is the fastest to read, zstd the smallest."""
    force: bool = False
    """Replace the file if it exists."""
    partition: str | None = None
    """With --by session: length of time, such as 1d, whose borders no file or session crosses; files are in this order."""
    memory: str = "1GiB"
    """With --by session: memory in which DuckDB sorts; the rest is spilled to disk, next to --out."""
    layout: Literal["once", "rows"] = "once"
    """With --by session: once leaves out a list that equals the one in the row above; rows writes all lists."""
    engine: Literal["local", "spark"] = "local"
    """With --by session: what sorts the rows, DuckDB in this process or Apache Spark."""
    master: str | None = None
    """With --engine spark: where Spark runs, such as local[4] or spark://HOST:7077."""
    check: bool = False
    """Read the data and what was written once more, and compare all rows by their hashes, in any order."""

    def __post_init__(self) -> None:
        check_files(self.data, self.out)
        if self.by is None:
            for name in _BY_SESSION:
                if getattr(self, name) != getattr(Convert, name):
                    raise ValueError(f"{name} is for folders by session: set by to session, or leave {name} out")
            check_out(self.out, self.force, ".parquet")
            return
        check_out(self.out, force=True, folder=True)  # a folder that is there is refused once nobody else writes it
        if self.engine != "spark" and self.master is not None:
            raise ValueError(f"master is {self.master!r}, and engine is not spark: set engine to spark")
        if self.engine == "local" and find_spec("duckdb") is None:
            raise WrongFlags("by is 'session', and duckdb is not installed: pip install 'skirl[sessions]'")
        self._sessions()
        if parsed("memory", self.memory, parse_bytes, "a size such as 1GiB") < LEAST_MEMORY:
            raise ValueError(f"memory is {self.memory!r}: set it to {size(LEAST_MEMORY)} or more")

    @timed
    def run(self) -> dict[str, Any]:
        from skirl.data.convert import convert
        from skirl.dedup.by_session import convert_by_session
        from skirl.dedup.spark import session_at

        request, out = self._sessions(), str(self.out)
        encoding: dict[str, Any] = {"rows": self.rows, "vocab": self.vocab}
        if self.by is None:
            found = convert(self.files(**encoding), out, self.compression, as_rows=request.as_rows)
        else:
            files, memory = self.files(PART, **encoding), parse_bytes(self.memory)
            with session_at(self.master) if self.engine == "spark" else nullcontext() as session:
                found = convert_by_session(files, out, request, memory=memory, session=session, force=self.force)
        return found | (self._checked() if self.check else {})

    def _sessions(self) -> Any:
        from skirl.dedup.sessions import Sessions

        names = ("session", "user", "gap", "partition", "layout", "compression")
        return Sessions(
            **{name: getattr(self, name) for name in names}, as_rows=self.rows is not None or self.vocab is not None
        )

    def _checked(self) -> dict[str, Any]:
        from skirl.data.convert import as_written
        from skirl.dedup.row_hash import same_rows
        from skirl.dedup.sessions import shaped

        files, request = self.files(PART, rows=self.rows, vocab=self.vocab), self._sessions()
        if self.by is None:
            files, schema, kept = as_written(files, request.as_rows)
        else:
            files, shape = shaped(files, request)
            schema, kept = shape.schema, shape.kept
        found = same_rows(files, schema, kept, DataFlags(f"parquet:{self.out}", workers=self.workers).files())
        wrong = f"{self.out} has {found['rows_written']:,} rows, which are not the {found['rows']:,} of {self.data}"
        return {"check": found, "failed": None if found["same"] else f"{wrong}: do not use it, and please report this"}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = facts(result, *READ, "sessions", "files", "bytes", "peak_bytes")
        lines["out"] = f"{self.out}; train with `skirl train parquet:{self.out}`"
        if self.check:
            lines["checked"] = "same rows, by hash" if result["check"]["same"] else "other rows"
        return lines


@dataclass(frozen=True)
class Analyze(SessionFlags):
    memory: str = "64MiB"
    """Memory for sampled rows; if the data has more rows, fewer sessions are looked at."""

    def __post_init__(self) -> None:
        from skirl.dedup.sessions import Sessions

        check_files(self.data)
        Sessions(self.session, self.user, self.gap)
        if parsed("memory", self.memory, parse_bytes, "a size such as 64MiB") < 1 << 20:
            raise ValueError(f"memory is {self.memory!r}: set it to 1MiB or more")

    @timed
    def run(self) -> dict[str, Any]:
        from skirl.dedup.analyze import advice, analyze
        from skirl.dedup.sessions import Sessions, keyed, shaped

        files = self.files(PART)
        if any(column.run for column in files.encoder.schema.ids):
            return advice("lists that repeat are left out of these files already")
        files, shape = shaped(files, Sessions(self.session, self.user, self.gap))
        now = sum(Path(path).stat().st_size for path in files.dataset.paths)
        return analyze(keyed(files, shape), shape, keep=parse_bytes(self.memory), now=now)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = facts(result, "verdict", "samples", "seconds", "sessions", "per_session", "sampled")
        columns = sorted(result.get("columns", {}).items(), key=lambda named: -named[1]["factor"])
        lines |= facts({"columns": [{"name": name, **of} for name, of in columns]})
        return lines | facts(result, "bytes", "peak_bytes")


@dataclass(frozen=True)
class Export(ShowFlags):
    checkpoint: Path
    """A folder of checkpoints, or the header of one."""
    out: Path
    """The file to write: .safetensors, .pt for a state dict, or .parquet."""
    table: str | None = None
    """The table to write; all tables if not given."""
    state_dict: bool = False
    """Write every row, named as in a state dict: TABLE.weight, or weight with --table; a .pt file always is one."""
    dense: bool = False
    """With a state dict (.pt, or --state-dict): also write the dense parameters and buffers, by their names in the model."""
    force: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        check_out(self.out, self.force, ".safetensors, .pt or .parquet")
        if self.out.suffix == ".parquet" and (self.state_dict or self.dense):
            raise ValueError("Parquet holds rows with their numbers: leave state-dict and dense out")
        if self.dense and not (self.state_dict or self.out.suffix == ".pt"):
            raise ValueError("dense parameters go with a state dict: add --state-dict")

    def run(self) -> dict[str, Any]:
        from skirl.checkpoint.export import write_rows
        from skirl.checkpoint.import_rows import opened
        from skirl.data.vocabulary.vocabulary import Origins

        with opened(self.checkpoint) as (rows, parameters, data, _), writing(self.out):
            origins = Origins.of(data) if self.out.suffix == ".parquet" else None
            dense = parameters if self.dense else None
            write_rows(rows, self.out, self.table, state_dict=self.state_dict, dense=dense, origins=origins)
        return {"bytes": self.out.stat().st_size}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        return facts(result, "checkpoint", "out", "bytes")


@dataclass(frozen=True)
class Import(ShowFlags):
    """Make a checkpoint of the rows of a trained PyTorch model. `skirl.import_rows(model, FOLDER)` reads it, and so does
    `skirl train --from FOLDER`, with encode = "row" in the schema for ids that are row numbers."""

    source: Path
    """A state dict, as .safetensors or as written by torch.save, or a file written by `skirl export`."""
    out: Path
    """The folder to write the checkpoint to."""
    table: tuple[str, ...] = ()
    """The tables, each the end of a weight's name without .weight; if not given, every two-dimensional NAME.weight."""
    optimizer: OptimizerName | None = None
    """The optimizer that will train the rows, whose state a file of `skirl export` may hold; that of such a file if not
    given, else rowwise-adagrad."""
    store: str = "memory"
    """Where rows are held during the import: memory, or disk:FOLDER for tables larger than memory."""

    def run(self) -> dict[str, Any]:
        from skirl.checkpoint.import_rows import read_rows

        return read_rows(self.source, self.out, names=self.table, optimizer=self.optimizer, store=self.store)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        return facts(result, "tables", "optimizer") | {"out": f"{self.out}; train with --from {self.out}"}


@dataclass(frozen=True)
class Info(ShowFlags):
    path: Path
    """The file or folder; nothing in it is changed or locked."""
    check: bool = False
    """Read a whole checkpoint and compare its checksums; without this, only sizes are checked."""

    def run(self) -> dict[str, Any]:
        from skirl.sizing.look import look

        return look(self.path, check=self.check)

    def summary(self, result: Mapping[str, Any]) -> dict[str, str]:
        return facts(result, *(name for name in result if name not in ("command", "failed", *flat_of(self))))
