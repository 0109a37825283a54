"""`skirl vocab`: one pass over the data, and the ids that came often enough have rows of their own.

Rows that are held out with --valid are not looked at: a vocabulary that knew them would leak. The pass counts exactly,
in the memory it is allowed (counting.py), and takes what dense columns need to be standardised on the way.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from skirl.data.flags import check_in_and_out
from skirl.data.vocabulary.counting import Counters
from skirl.data.vocabulary.vocabulary import FIRST, MOST, Facts, save
from skirl.tools.machine import machine, peak_bytes
from skirl.tools.progress import Progress, clock, size
from skirl.tools.sizes import parse_bytes


@dataclass(frozen=True)
class Vocab:
    """Flags of `skirl vocab`."""

    data: str
    """The files: criteo:PATH, avazu:PATH, csv:PATH or parquet:PATH, as for `skirl train`."""
    out: str
    """The vocabulary file to write."""
    _: KW_ONLY
    min_count: int = 10
    """An id has a row of its own if it came at least so many times; all others share one."""
    memory: str = "1GiB"
    """Memory for counting; counts that do not fit go to disk."""
    schema: str | None = None
    """A TOML file that names the columns; criteo: and avazu: have one built in."""
    valid: str | None = None
    """What will be held out of training, as for `skirl train`: it is not counted."""
    workers: int = 0
    """Processes that read files; 0: this one does."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with a malformed row: refuse, or skip the row and count it."""
    folder: str | None = None
    """Where counts that do not fit in memory are written; beside the vocabulary if not set."""
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

    def run(self) -> dict[str, Any]:
        """Count, and write what is kept."""
        from skirl.data.open import open_to_count  # Arrow is imported where files are read, and only there

        started = time.monotonic()
        files = open_to_count(
            self.data, self.schema, valid=self.valid, workers=self.workers, skip=self.bad_rows == "skip"
        )
        schema = files.encoder.schema
        types = schema.kinds
        if not types:
            raise ValueError("every id column is a row already: there is nothing to make a vocabulary of")
        moments = {column.name: Moments() for column in schema.standardised}
        columns = [(column.table or column.name, k) for k, column in enumerate(schema.ids) if column.encode == "hash"]
        folder = Path(self.folder or Path(self.out).absolute().parent)
        samples = 0
        with Counters(list(types), parse_bytes(self.memory), folder) as counters:
            with Progress(
                "count", steps=None, to=sys.stderr if self.json else sys.stdout, quiet=self.quiet
            ) as progress:
                for number, piece in enumerate(files.pieces(), start=1):
                    for table, k in columns:
                        counters.add(table, piece.ids[k].view(np.uint64))
                    at = 0
                    for column in schema.dense:
                        if column.name in moments:
                            moments[column.name].add(piece.dense[:, at])
                        at += 1 + column.indicator
                    samples += len(piece)
                    facts = {"samples": f"{samples:,}", "on disk": size(counters.spilled)}
                    progress(number, lambda facts=facts: facts)
            kept, distinct = {}, {}
            for table in types:
                kept[table], distinct[table] = self._kept(table, counters.merged(table))
            spilled, runs = counters.spilled, counters.runs
        means = {name: moment.result(name) for name, moment in moments.items()}
        save(self.out, Facts(types, self.min_count, samples, means), kept)
        rows = {table: len(keys) + FIRST for table, (keys, _) in kept.items()}
        return {
            "command": "vocab",
            **asdict(self),
            "samples": samples,
            "bad_rows_skipped": files.bad_rows,
            "distinct": distinct,
            "rows": rows,
            "means": means,
            "spilled_bytes": spilled,
            "runs": runs,
            "seconds": time.monotonic() - started,
            "peak_bytes": peak_bytes(),
            "machine": machine(),
            "failed": None,
        }

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        """The result as people read it."""
        rows, distinct = sum(result["rows"].values()), sum(result["distinct"].values())
        skipped = result["bad_rows_skipped"]
        return {
            "read": f"{result['samples']:,} samples in {clock(result['seconds'])}"
            + (f"; {skipped:,} malformed rows were left out" if skipped else ""),
            "rows": f"{rows:,} in {len(result['rows'])} tables, of {distinct:,} distinct values",
            "disk": f"{size(result['spilled_bytes'])} for counts that did not fit in {self.memory}",
            "memory": f"{size(result['peak_bytes'])} at its peak, the whole process",
            "saved": f"{self.out}; train with --vocab {self.out}",
        }

    def _kept(
        self, table: str, merged: Iterator[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[tuple[np.ndarray, np.ndarray], int]:
        """The fingerprints that came often enough, the most frequent first (ties by fingerprint); how many there were."""
        keys, counts, distinct = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0
        for some, times in merged:
            distinct += len(some)
            often = times >= self.min_count
            keys.append(np.array(some[often]))
            counts.append(np.array(times[often]))
        found, times = np.concatenate(keys), np.concatenate(counts)
        if len(found) > MOST:
            raise ValueError(f"table {table!r} would have {len(found):,} rows, more than 2**31: set a larger min_count")
        order = np.lexsort((found, np.iinfo(np.int64).max - times.astype(np.int64)))
        return (found[order], times[order]), distinct


class Moments:
    """Mean and deviation of numbers that come in pieces, NaN left out; merged as Chan, Golub and LeVeque do.

    >>> moments = Moments()
    >>> moments.add(np.array([1.0, np.nan]))
    >>> moments.add(np.array([3.0]))
    >>> moments.result("x")
    (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """More numbers."""
        values = values[~np.isnan(values)].astype(np.float64)
        n = len(values)
        if n:
            mean = float(values.mean())
            shift = mean - self.mean
            self.squares += float(((values - mean) ** 2).sum()) + shift * shift * self.count * n / (self.count + n)
            self.mean += shift * n / (self.count + n)
            self.count += n

    def result(self, name: str) -> tuple[float, float]:
        """Mean and deviation."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 0.0
        if not deviation > 0:
            raise ValueError(
                f"dense column {name!r} has one value only: there is nothing to standardise, set transform to none"
            )
        return self.mean, deviation
