"""The commands that make data files: their flags, and what they print. Their work is imported only when they run."""

import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from skirl.data.flags import DataFlags, check_in_and_out
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import clock, malformed, size
from skirl.tools.units import parse_bytes


@dataclass(frozen=True)
class Vocab:
    """Flags of `skirl vocab`."""

    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "counting": ("memory", "folder", "bad_rows"),
        "output": ("json", "quiet"),
    }

    data: str
    """The files to read: criteo:PATH, avazu:PATH, mind:PATH, csv:PATH or parquet:PATH, as for `skirl train`."""
    out: str
    """The vocabulary file to write."""
    _: KW_ONLY
    min_count: int = 10
    """Give an id a row of its own if it occurs at least this many times; all other ids share one row."""
    memory: str = "1GiB"
    """Memory to use for counting; counts that do not fit go to disk."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    valid: str | None = None
    """The rows that training will hold out, as for `skirl train`; they are not counted."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse the files, or skip the row and count it."""
    folder: str | None = None
    """Where to write counts that do not fit in memory; next to the vocabulary file if not given."""
    force: bool = False
    """Replace the vocabulary file if it exists. Runs that used it can then no longer be resumed."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count is {self.min_count}: set it to 1 or more")
        try:
            parse_bytes(self.memory)
        except ValueError:
            raise ValueError(f"memory is {self.memory!r}: set it to a size such as 4GiB") from None
        check_in_and_out(self.data, self.out)
        if Path(self.out).exists() and not self.force:
            raise ValueError(
                f"--out is {self.out}, which already exists, and runs may need it: name another file, or add --force to "
                "replace it"
            )

    def run(self) -> dict[str, Any]:
        from skirl.data.vocab import count

        return timed(
            "vocab",
            self,
            lambda: count(
                self.data,
                self.out,
                schema=self.schema,
                valid=self.valid,
                workers=self.workers,
                skip=self.bad_rows == "skip",
                min_count=self.min_count,
                memory=parse_bytes(self.memory),
                folder=None if self.folder is None else Path(self.folder),
                json=self.json,
                quiet=self.quiet,
            ),
        )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        rows, distinct = sum(result["rows"].values()), sum(result["distinct"].values())
        skipped = result["bad_rows_skipped"]
        return {
            "read": f"{result['samples']:,} samples in {clock(result['seconds'])}"
            + (f"; left out: {malformed(skipped, result['first_bad_row'])}" if skipped else ""),
            "rows": f"{rows:,} in {len(result['rows'])} tables, of {distinct:,} distinct values",
            "disk": f"{size(result['spilled_bytes'])} for counts that did not fit in {self.memory}",
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
            "saved": f"{self.out}; train with --vocab {self.out}",
        }


@dataclass(frozen=True)
class ConvertToFile:
    """Flags of `skirl convert`."""

    data: str
    """The files to read: criteo:PATH, avazu:PATH, mind:PATH, csv:PATH or parquet:PATH, as for `skirl train`."""
    out: str
    """The Parquet file to write; with --by session, the folder."""
    _: KW_ONLY
    rows: str | None = None
    """Write ids as rows of tables of this size, as for `skirl train`; fingerprints are written if neither this nor
    --vocab is given."""
    vocab: str | None = None
    """Write ids as rows of this vocabulary."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    compression: Literal["none", "snappy", "lz4", "zstd"] = "none"
    """How to compress pages: none is the fastest to read, zstd the smallest."""
    workers: int = 0
    """Processes that read files; with 0 this process reads them."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse the files, or leave the row out and count it."""
    force: bool = False
    """Replace the file if it exists."""
    json: bool = False
    """Print the results as one line of JSON."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self) -> None:
        check_in_and_out(self.data, self.out)
        if Path(self.out).exists() and not self.force:
            raise ValueError(
                f"--out is {self.out}, which already exists: name another file, or add --force to replace it"
            )

    def flags(self) -> DataFlags:
        """Return the flags of the data to read."""
        return DataFlags(
            self.data,
            rows=self.rows,
            vocab=self.vocab,
            schema=self.schema,
            workers=self.workers,
            bad_rows=self.bad_rows,
        )

    def run(self) -> dict[str, Any]:
        from skirl.data.convert import convert

        as_rows = self.rows is not None or self.vocab is not None
        return timed(
            "convert",
            self,
            lambda: convert(
                self.flags().files(), self.out, self.compression, as_rows=as_rows, json=self.json, quiet=self.quiet
            ),
        )

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        skipped = result["bad_rows_skipped"]
        return {
            "written": f"{result['samples']:,} samples in {clock(result['seconds'])}, {size(result['bytes'])}"
            + (f"; left out: {malformed(skipped, result['first_bad_row'])}" if skipped else ""),
            "saved": f"{self.out}; train with --data parquet:{self.out}",
        }


def timed(name: str, flags: Vocab | ConvertToFile, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` and return the command's result: its flags, what the work found, and the time and memory it took."""
    started = time.monotonic()
    found = work()
    took = {"seconds": time.monotonic() - started, "peak_bytes": peak_bytes(), "machine": machine()}
    return {"command": name, **asdict(flags), **found, **took, "failed": None}
