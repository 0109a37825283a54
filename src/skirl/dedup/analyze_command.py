"""`skirl analyze`: its flags, and what it prints. Its work is imported only when it runs."""

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, ClassVar, Literal

from skirl.data.flags import FILE_KINDS, KINDS, SESSIONS, DataFlags
from skirl.dedup.asked import MEMORY, PART, check_sessions, parsed
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import clock, size
from skirl.tools.units import parse_bytes

_OF_FILES = ("session", "user", "gap", "schema", "workers", "bad_rows")
_OF_SYNTHETIC = ("samples", "per_session", "change", "lists", "drift", "pooling_factor", "seed")
_LOAD = 16 << 20
SHOWN = 12
"""Most columns that the summary shows."""


@dataclass(frozen=True)
class Analyze:
    """Flags of `skirl analyze`."""

    common: ClassVar[tuple[str, ...]] = ("data", "session", "user", "gap", "batch", "sample", "schema", "workers")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "files": ("compression", "bad_rows"),
        "synthetic": ("samples", "per_session", "change", "lists", "drift", "pooling_factor", "seed"),
        "output": ("json", "quiet"),
    }

    data: str
    """Where samples come from: files, as for `skirl convert`, or synthetic:sessions."""
    _: KW_ONLY
    session: str | None = None
    """The column that says which rows belong together; the schema's session column if not given."""
    user: str | None = None
    """The column of users, if no column says the session: a session ends after --gap without a row."""
    gap: str | None = None
    """With --user: time without a row that ends a session, such as 30m. Times that are numbers are in seconds, or in the
    schema's time_unit."""
    batch: int = 4096
    """Samples in a batch, for the estimates of lookups and of the smallest cache."""
    compression: Literal["none", "snappy", "lz4", "zstd"] = "none"
    """Compression of pages."""
    sample: str = "64MiB"
    """Memory for sampled rows; if the data has more rows, fewer sessions are looked at."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of malformed rows: refuse the files, or leave the row out."""
    samples: int = 50_000
    """With synthetic:sessions: the number of samples."""
    per_session: float = 16.5
    """With synthetic:sessions: average number of samples in a session."""
    change: float = 0.05
    """With synthetic:sessions: probability that a list differs from the previous sample's."""
    lists: int = 3
    """With synthetic:sessions: lists in a sample."""
    drift: Literal["redraw", "shift"] = "redraw"
    """With synthetic:sessions: redraw: a list that changes is drawn again; shift: it gains one id and loses its
    oldest."""
    pooling_factor: int = 1
    """With synthetic:sessions: average number of ids in a list; 75 if not given."""
    seed: int = 0
    """With synthetic:sessions: seed of the samples."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        if self._kind not in ("synthetic", *FILE_KINDS):
            raise ValueError(f"data is {self.data!r}: set it to {KINDS}")
        synthetic = self._kind == "synthetic"
        what, other = ("files", "synthetic") if synthetic else ("synthetic data", "files")
        for name in _OF_FILES if synthetic else _OF_SYNTHETIC:
            if getattr(self, name) != getattr(Analyze, name):
                raise ValueError(f"{name} is a flag of {what}, and data is {other}: leave it out")
        for name in ("batch", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: set it to 1 or more")
        check_sessions(self.session, self.user, self.gap)
        if parsed("sample", self.sample, parse_bytes, "a size such as 64MiB") < 1 << 20:
            raise ValueError(f"sample is {self.sample!r}: set it to 1MiB or more")

    @property
    def _kind(self) -> str:
        return self.data.partition(":")[0]

    def run(self) -> dict[str, Any]:
        """Read all data once, analyze a sample of its sessions, and return the result."""
        from skirl.dedup.analyze import AS_IT_IS, NO_SESSION, AnalyzedRows, analyze

        started = time.monotonic()
        given: AnalyzedRows | None = None
        if self._kind == "synthetic":
            given = self._generated() if self.data.partition(":")[2] == SESSIONS else None
            found = NO_SESSION
        else:
            files = DataFlags(
                self.data, schema=self.schema, workers=self.workers, bad_rows=self.bad_rows
            ).files(PART)  # fmt: skip
            schema = files.encoder.schema
            found = AS_IT_IS if any(column.run for column in schema.ids) else NO_SESSION
            if found is NO_SESSION and (self.session or self.user or schema.session):
                given = self._read(files)
        if given is not None:
            found = analyze(
                given, keep=parse_bytes(self.sample), batch=self.batch, json=self.json, quiet=self.quiet
            )  # fmt: skip
        took = {"seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}
        return {"command": "analyze", "flags": asdict(self), **found, **took, "failed": None}

    def _read(self, files: Any) -> Any:
        from skirl.dedup.analyze import AnalyzedRows
        from skirl.dedup.wanted import Wanted, loads, shaped

        wanted = Wanted(self.session, self.user, self.gap, None, parse_bytes(MEMORY), "once", self.compression, False)
        files, shape = shaped(files, wanted)
        return AnalyzedRows(loads(files, shape, _LOAD), shape, wanted.unit)

    def _generated(self) -> Any:
        from skirl.data.sessions import Sessions
        from skirl.dedup.analyze import AnalyzedRows
        from skirl.dedup.generated import given

        data = Sessions(
            batch_size=8192, seed=self.seed, pooling_factor=self.pooling_factor, per_session=self.per_session,
            change=self.change, histories=self.lists, drift=self.drift, once=False,
        )  # fmt: skip
        return AnalyzedRows(*given(data, self.samples, self.compression))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as labelled lines for people to read."""
        told = {"verdict": _wrapped(result["verdict"])}
        if "projected" not in result:
            if result["verdict"].endswith("no session column"):
                told["instead"] = _wrapped("name it with --session, or the users with --user COLUMN --gap 30m")
            return told
        sampled, projected = result["sampled"], result["projected"]
        lookup, least, bytes_ = projected["lookup"], projected["least_cache"], projected["bytes"]
        told["rows"] = (
            f"{result['samples']:,} in {clock(result['seconds'])}; {sampled['samples']:,} looked at, of 1 in "
            f"{sampled['one_in']:,} sessions"
        )
        told["sessions"] = f"about {result['sessions']:,}, of {result['per_session']:.1f} samples"
        told["columns"] = _table(result["columns"])
        if result["groups"]:
            told["together"] = "\n".join(_wrapped(", ".join(names)) for names in result["groups"])
        names = {"as_it_is": "in order", "rows": "by session", "once": "lists once", "window": "windows"}
        told["files"] = "\n".join(
            f"{names[name]:<11}{size(count):>10}   {bytes_['as_it_is'] / max(1, count):4.1f} times as small"
            for name, count in bytes_.items()
            if count is not None
        )
        told["files"] += f"\nif written with --compression {self.compression}"
        if projected["reader"]:
            rates = projected["reader"]["rows_per_second"]
            told["reader"] = (
                f"{rates['once']:,} rows/s by session, {rates['as_it_is']:,} in order, one core: "
                f"{projected['reader']['x']:.1f}x"
            )
        told["lookup"] = (
            f"{lookup['ids_once']:,} ids of {lookup['ids']:,} in {lookup['batch']:,} samples: {lookup['x']:.1f} times fewer"
        )
        if lookup["ids_windows"] is not None:
            told["lookup"] += (
                f"\n{lookup['ids_windows']:,} as windows, by din and dcat: {lookup['windows_x']:.1f} times fewer"
            )
        told["least cache"] = f"{least['by_session']:,} rows by session, {least['as_it_is']:,} in order"
        if result["advice"] != "don't bother":
            given = [
                f"--{name} {value}" for name in ("schema", "session", "user", "gap") if (value := getattr(self, name))
            ]
            if self.compression != "none":
                given.append(f"--compression {self.compression}")
            layout = ["--layout window"] if result["advice"] == "windows" else []
            told["next"] = _wrapped(
                " ".join(["skirl convert --by session", *layout, f"--data {self.data}", *given, "--out FOLDER"])
            )
        told["memory"] = f"{size(result['peak_bytes'])} at its peak, the whole process"
        return told


def _table(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the columns: lists first, then by how often they repeat."""
    order = sorted(columns, key=lambda name: (not columns[name]["list"], -columns[name]["factor"]))
    width = min(24, max(6, *(len(name) for name in order[:SHOWN])))
    lines = [f"{'name':<{width}} {'ids':>7} {'changes':>8} {'factor':>7} {'windows':>8}"]
    for name in order[:SHOWN]:
        of = columns[name]
        short = name if len(name) <= width else name[: width - 1] + "…"
        windows = f"{of['window_factor']:.1f}" if of["window_factor"] else ""
        factor = f"{of['factor']:.1f}"
        lines.append(
            f"{short:<{width}} {of['ids']:>7.1f} {of['change']:>8.1%} {factor:>7} {windows:>8}".rstrip()
        )  # fmt: skip
    if len(order) > SHOWN:
        lines.append(f"and {len(order) - SHOWN} more, which repeat less: --json has them")
    return "\n".join(lines)


def _wrapped(text: str, width: int = 62) -> str:
    from textwrap import fill

    return fill(text, width, break_long_words=False)
