"""The commands of this folder: their flags, and what they print. Their work is imported only when they run."""

import re
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any, ClassVar, Literal

from skirl.data.commands import ConvertToFile, timed
from skirl.data.flags import DataFlags, check_in_and_out
from skirl.dedup.asked import LENGTH, MEMORY, PART, check_sessions, parsed
from skirl.dedup.folders import check_apart
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import clock, size
from skirl.tools.units import parse_bytes, parse_seconds


@dataclass(frozen=True)
class Convert(ConvertToFile):
    """Flags of `skirl convert`: those for one file, and those for a folder of files by session."""

    common: ClassVar[tuple[str, ...]] = ("data", "out", "by", "session", "rows", "vocab", "schema", "workers", "force")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "session": ("user", "gap", "partition", "layout", "memory", "engine", "master"),
        "files": ("compression", "bad_rows"),
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
    memory: str = MEMORY
    """With --by session: memory of this process, without that of --workers; the rest is spilled to disk, next to --out."""
    layout: Literal["once", "window", "rows"] = "once"
    """With --by session: once leaves out a list that equals the one in the row above; window is for lists that shift;
    rows writes all lists."""
    engine: Literal["local", "spark"] = "local"
    """With --by session: what moves the rows, this process or Apache Spark; the files are identical to the byte."""
    master: str | None = None
    """With --engine spark: where Spark runs, such as local[4], spark://HOST:7077 or sc://HOST; Spark's own default if not
    given."""

    def __post_init__(self) -> None:
        if self.by is None:
            for name in _BY_SESSION:
                if getattr(self, name) != getattr(Convert, name):
                    raise ValueError(f"{name} is for folders by session: set by to session, or leave {name} out")
            super().__post_init__()
            return
        check_in_and_out(self.data, self.out, folder=True)
        check_apart(self.data, self.out)
        self._check_engine()
        check_sessions(self.session, self.user, self.gap)
        if self.partition is not None:
            parsed("partition", self.partition, parse_seconds, LENGTH)
        if parsed("memory", self.memory, parse_bytes, "a size such as 1GiB") < LEAST_MEMORY:
            raise ValueError(f"memory is {self.memory!r}: set it to {size(LEAST_MEMORY)} or more")

    def _check_engine(self) -> None:
        if self.engine != "spark" and self.master is not None:
            raise ValueError(
                f"master is {self.master!r}, and engine is not spark: set engine to spark, or leave master out"
            )
        if self.engine == "spark" and self.workers:
            raise ValueError(
                f"workers is {self.workers}, and Spark's processes read the files: leave workers or engine out"
            )

    def run(self) -> dict[str, Any]:
        """Convert the files, and return the result."""
        if self.by is None:
            return super().run()
        from skirl.dedup.by_session import convert_by_session
        from skirl.dedup.local import Local
        from skirl.dedup.spark import Spark
        from skirl.dedup.wanted import Wanted

        names = ("session", "user", "gap", "partition", "layout")
        wanted = Wanted(
            **{name: getattr(self, name) for name in names},
            memory=parse_bytes(self.memory),
            compression=self.compression,
            as_rows=self.rows is not None or self.vocab is not None,
        )
        say = {"force": self.force, "json": self.json, "quiet": self.quiet}
        engine = Spark(self.master) if self.engine == "spark" else Local()
        files = self.flags().files(PART)
        return timed("convert", self, lambda: convert_by_session(files, self.out, wanted, engine, **say))

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as labelled lines for people to read."""
        told = super().summary(result)
        if self.by is None:
            return told
        cut = {
            "cut_at_borders": f"cut at borders of {self.partition}",
            "cut_as_too_long": "longer than 10,000 rows: cut",
        }
        counted = [f"{result['sessions']:,}", *(f"{result[k]:,} {what}" for k, what in cut.items() if result[k])]
        groups = [f"{', '.join(names)} ({run})" for run, names in result["groups"].items()]
        others = "those of Spark" if self.engine == "spark" else "its workers" if self.workers else ""
        return {
            "written": f"{told['written']} in {result['files']:,} files",
            "sessions": ", ".join(counted),
            **({"left out": f"{_LEFT_OUT[self.layout]}: {'; '.join(groups)}"} if groups else {}),
            "disk": f"{size(result['spilled_bytes'])} for rows in order while it ran",
            "memory": f"{size(result['peak_bytes'])} at its peak, "
            + (f"this process, without {others}" if others else "the whole process"),
            "saved": told["saved"],
        }


_LEFT_OUT = {"once": "lists that repeat", "window": "ids that lists share with others of their session"}
_OF_DATA = re.compile(r"(?:^|(?<=set )|(?<=leave ))(data|schema)(?= (?:is|names|to|out) )")
"""Flags of one data set where an error names them."""
_BY_SESSION = ("session", "user", "gap", "partition", "memory", "layout", "engine", "master")
LEAST_MEMORY = 640 << 20


@dataclass(frozen=True)
class Same:
    """Flags of `skirl same`."""

    data: str
    """The files, as for `skirl convert`."""
    as_: str
    """The files to compare them with."""
    _: KW_ONLY
    schema: str | None = None
    """A TOML file that names the columns of data; converted files, criteo:, avazu: and mind: have one built in."""
    as_schema: str | None = None
    """The same for the files to compare with."""
    session: str | None = None
    """The session column of data, if `skirl convert` was given one; the schema's session column if not given."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of malformed rows: refuse the files, or leave the row out."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def run(self) -> dict[str, Any]:
        """Read both data sets, compare them, and return the result."""
        from skirl.dedup.same import same

        started = time.monotonic()
        read = {"workers": self.workers, "bad_rows": self.bad_rows}
        data = DataFlags(self.data, schema=self.schema, **read).files()
        try:
            others = DataFlags(self.as_, schema=self.as_schema, **read).files()
        except ValueError as error:
            raise ValueError(_OF_DATA.sub(lambda name: f"as_{name[1]}".removesuffix("data"), str(error))) from None
        found = same(data, others, session=self.session, json=self.json, quiet=self.quiet)
        took = {"seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}
        return {"command": "same", **asdict(self), **found, **took}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """Return the result as labelled lines for people to read."""
        return {
            "samples": f"{result['samples']:,} and {result['samples_as']:,} in {clock(result['seconds'])}",
            "compared": ", ".join(result["compared"]),
            **({"left out": ", ".join(result["not_compared"])} if result["not_compared"] else {}),
            "same": "yes, whatever the order" if result["same"] else "no",
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
        }
