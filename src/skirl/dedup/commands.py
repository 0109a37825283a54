"""`skirl convert` and `skirl analyze`: their flags, and what they print. Their work is imported only when they run."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass
from importlib.util import find_spec
from textwrap import fill
from typing import Any, ClassVar, Literal

from skirl.data.commands import ConvertToFile, timed
from skirl.data.flags import DataFlags, check_in_and_out
from skirl.tools.flags import WrongFlags
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import clock, size
from skirl.tools.units import parse_bytes

PART = 1 << 18
"""Bytes of text to read at a time: the rows in it may be many times as large."""
LEAST_MEMORY = 256 << 20
SHOWN = 12
"""Most columns that the summary shows."""
_BY_SESSION = ("session", "user", "gap", "partition", "memory", "layout", "engine", "master")


@dataclass(frozen=True)
class Convert(ConvertToFile):
    """Flags of `skirl convert`: those for one file, and those for a folder of files by session."""

    common: ClassVar[tuple[str, ...]] = ("data", "out", "by", "session", "rows", "vocab", "schema", "workers", "force")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "session": ("user", "gap", "partition", "layout", "memory", "engine", "master"),
        "files": ("compression", "bad_rows", "check"),
        "output": ("json", "quiet"),
    }

    by: Literal["session"] | None = None
    """Write a folder of files in which the rows of a session are contiguous; if not given, one file in the order of the
    data."""
    session: str | None = None
    """With --by session: the column that says which rows belong together; the schema's session column if not given."""
    user: str | None = None
    """With --by session: the column of users, if no column says the session: a session ends after --gap without a
    row."""
    gap: str | None = None
    """With --user: time without a row that ends a session, such as 30m. Times that are numbers are in seconds, or in the
    schema's time_unit."""
    partition: str | None = None
    """With --by session: length of time, such as 1d, whose borders no file or session crosses; files are in this order."""
    memory: str = "1GiB"
    """With --by session: memory in which DuckDB sorts; the rest is spilled to disk, next to --out."""
    layout: Literal["once", "rows"] = "once"
    """With --by session: once leaves out a list that equals the one in the row above; rows writes all lists."""
    engine: Literal["local", "spark"] = "local"
    """With --by session: what sorts the rows, DuckDB in this process or Apache Spark."""
    master: str | None = None
    """With --engine spark: where Spark runs, such as local[4], spark://HOST:7077 or sc://HOST; Spark's own default if not
    given."""
    check: bool = False
    """Read the data and what was written once more, and compare all rows by their hashes, in any order."""

    def __post_init__(self) -> None:
        from skirl.dedup.sessions import parsed

        if self.by is None:
            for name in _BY_SESSION:
                if getattr(self, name) != getattr(Convert, name):
                    raise ValueError(f"{name} is for folders by session: set by to session, or leave {name} out")
            super().__post_init__()
            return
        check_in_and_out(self.data, self.out, folder=True)
        if self.engine != "spark" and self.master is not None:
            raise ValueError(
                f"master is {self.master!r}, and engine is not spark: set engine to spark, or leave master out"
            )
        if self.engine == "spark" and self.workers:
            raise ValueError(
                f"workers is {self.workers}, and Spark's processes read the files: leave workers or engine out"
            )
        if self.engine == "local" and find_spec("duckdb") is None:
            raise WrongFlags("by is 'session', and duckdb is not installed: pip install 'skirl[sessions]'")
        self._sessions()
        if parsed("memory", self.memory, parse_bytes, "a size such as 1GiB") < LEAST_MEMORY:
            raise ValueError(f"memory is {self.memory!r}: set it to {size(LEAST_MEMORY)} or more")

    def run(self) -> dict[str, Any]:
        result = super().run() if self.by is None else timed("convert", self, self._by_session)
        return result | (self._checked() if self.check else {})

    def _by_session(self) -> dict[str, Any]:
        from skirl.dedup.by_session import convert_by_session
        from skirl.dedup.spark import session_at

        files, told = self.flags().files(PART), {"force": self.force, "json": self.json, "quiet": self.quiet}
        with session_at(self.master) if self.engine == "spark" else nullcontext() as session:
            return convert_by_session(
                files, self.out, self._sessions(), memory=parse_bytes(self.memory), session=session, **told
            )

    def _sessions(self) -> Any:
        from skirl.dedup.sessions import Sessions

        names = ("session", "user", "gap", "partition", "layout", "compression")
        as_rows = self.rows is not None or self.vocab is not None
        return Sessions(**{name: getattr(self, name) for name in names}, as_rows=as_rows)

    def _checked(self) -> dict[str, Any]:
        """Read the data and what was written, and compare them."""
        from skirl.data.convert import as_written
        from skirl.dedup.row_hash import same_rows
        from skirl.dedup.sessions import shaped

        files, request = self.flags().files(PART), self._sessions()
        if self.by is None:
            files, schema, kept = as_written(files, request.as_rows)
        else:
            files, columns = shaped(files, request)
            schema, kept = columns.schema, columns.kept
        found = same_rows(files, schema, kept, DataFlags(f"parquet:{self.out}", workers=self.workers).files())
        text = (
            f"{self.out} does not have the rows of {self.data} ({found['rows']:,} and {found['rows_written']:,} rows)"
        )
        return {"check": found, "failed": None if found["same"] else f"{text}: do not use it, and please report this"}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = super().summary(result)
        if self.by is not None:
            lines = {
                "written": f"{lines['written']} in {result['files']:,} files",
                "sessions": f"{result['sessions']:,}",
                "memory": f"{size(result['peak_bytes'])} at its peak, this process",
                "saved": lines["saved"],
            }
        if self.check:
            lines["checked"] = "same rows, by hash" if result["check"]["same"] else "other rows"
        return lines


@dataclass(frozen=True)
class Analyze:
    """Flags of `skirl analyze`."""

    common: ClassVar[tuple[str, ...]] = ("data", "session", "user", "gap", "batch", "sample", "schema", "workers")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"files": ("bad_rows",), "output": ("json", "quiet")}

    data: str
    """The files, as for `skirl convert`."""
    _: KW_ONLY
    session: str | None = None
    """The column that says which rows belong together; the schema's session column if not given."""
    user: str | None = None
    """The column of users, if no column says the session: a session ends after --gap without a row."""
    gap: str | None = None
    """With --user: time without a row that ends a session, such as 30m. Times that are numbers are in seconds, or in the
    schema's time_unit."""
    batch: int = 4096
    """Samples in a batch, for the estimate of lookups."""
    sample: str = "64MiB"
    """Memory for sampled rows; if the data has more rows, fewer sessions are looked at."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of malformed rows: refuse the files, or leave the row out."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        from skirl.dedup.sessions import Sessions, parsed

        check_in_and_out(self.data, ".", folder=True)
        if self.batch < 1:
            raise ValueError(f"batch is {self.batch}: set it to 1 or more")
        Sessions(self.session, self.user, self.gap)
        if parsed("sample", self.sample, parse_bytes, "a size such as 64MiB") < 1 << 20:
            raise ValueError(f"sample is {self.sample!r}: set it to 1MiB or more")

    def run(self) -> dict[str, Any]:
        from skirl.dedup.analyze import advice, analyze
        from skirl.dedup.sessions import Sessions, keyed, shaped

        started = time.monotonic()
        flags = DataFlags(self.data, schema=self.schema, workers=self.workers, bad_rows=self.bad_rows)
        files = flags.files(PART)
        schema = files.encoder.schema
        if any(column.run for column in schema.ids):
            found = advice("lists that repeat are left out of these files already")
        elif not (self.session or self.user or schema.session):
            found = advice("no session column")
        else:
            files, columns = shaped(files, Sessions(self.session, self.user, self.gap))
            shown = {"json": self.json, "quiet": self.quiet}
            found = analyze(keyed(files, columns), columns, keep=parse_bytes(self.sample), batch=self.batch, **shown)
        took = {"seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}
        return {"command": "analyze", "flags": asdict(self), **found, **took, "failed": None}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = {"verdict": _wrapped(result["verdict"])}
        if "sampled" not in result:
            if result["verdict"].endswith("no session column"):
                lines["instead"] = _wrapped("name it with --session, or the users with --user COLUMN --gap 30m")
            return lines
        sampled, lookup, bytes_ = result["sampled"], result["lookup"], result["bytes"]
        looked = f"{sampled['samples']:,} looked at, of 1 in {sampled['one_in']:,} sessions"
        lines["rows"] = f"{result['samples']:,} in {clock(result['seconds'])}; {looked}"
        lines["sessions"] = f"about {result['sessions']:,}, of {result['per_session']:.1f} samples"
        lines["columns"] = _table(result["columns"])
        lines["files"] = f"{size(bytes_['as_it_is'])} in their order, {size(bytes_['once'])} with lists once"
        lines["lookup"] = (
            f"{lookup['ids_once']:,} ids of {lookup['ids']:,} in {lookup['batch']:,} samples: {lookup['x']:.1f} times fewer"
        )
        if result["advice"] != "don't bother":
            given = [
                f"--{name} {value}" for name in ("schema", "session", "user", "gap") if (value := getattr(self, name))
            ]
            lines["next"] = _wrapped(
                " ".join(["skirl convert --by session", f"--data {self.data}", *given, "--out FOLDER"])
            )
        return lines | {"memory": f"{size(result['peak_bytes'])} at its peak, the whole process"}


def _table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the columns: lists first, then by how often they repeat."""
    order = sorted(columns, key=lambda name: (not columns[name]["list"], -columns[name]["factor"]))
    width = min(24, max(6, *(len(name) for name in order[:SHOWN])))
    lines = [f"{'name':<{width}} {'ids':>7} {'changes':>8} {'factor':>7}"]
    for name in order[:SHOWN]:
        of, short = columns[name], name if len(name) <= width else name[: width - 1] + "…"
        lines.append(f"{short:<{width}} {of['ids']:>7.1f} {of['change']:>8.1%} {of['factor']:>7.1f}")
    if len(order) > SHOWN:
        lines.append(f"and {len(order) - SHOWN} more, which repeat less: --json has them")
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return fill(text, 62, break_long_words=False)
