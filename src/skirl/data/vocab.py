"""Makes a vocabulary: after one pass over the data, the ids that occurred often enough get rows of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skirl.data.open import open_to_count
from skirl.data.vocabulary.counting import FingerprintCounts
from skirl.data.vocabulary.vocabulary import FIRST, MOST, Facts, save
from skirl.tools.progress import progress_of
from skirl.tools.units import size


def count(
    data: str,
    out: str,
    *,
    schema: str | None,
    valid: str | None,
    workers: int,
    skip: bool,
    min_count: int,
    memory: int,
    folder: Path | None,
) -> dict[str, Any]:
    """Count ids and write the vocabulary. The arguments are the flags of `skirl vocab`, with `memory` in bytes.

    Rows that `valid` holds out are not counted: a vocabulary that knew them would leak.
    """
    files = open_to_count(data, schema, valid=valid, workers=workers, skip=skip)
    columns = files.encoder.schema
    types = columns.kinds
    if not types:
        raise ValueError(
            'every id column holds rows already, not ids (encode = "row" in the schema): there is nothing to make a '
            "vocabulary of, train without one"
        )
    moments = {column.name: Moments() for column in columns.standardised}
    hashed = [(column.table or column.name, k) for k, column in enumerate(columns.ids) if column.encode == "hash"]
    samples = 0
    with FingerprintCounts(list(types), memory, folder or Path(out).absolute().parent) as counters:
        with progress_of("count") as progress:
            for number, piece in enumerate(files.pieces(), start=1):
                for table, k in hashed:
                    counters.add(table, piece.ids[k].expanded().values.view(np.uint64))
                at = 0
                for column in columns.dense:
                    if column.name in moments:
                        moments[column.name].add(piece.dense[:, at])
                    at += 1 + column.indicator
                samples += len(piece)
                facts = {"samples": f"{samples:,}", "on disk": size(counters.spilled)}
                progress(number, lambda facts=facts: facts)
        kept, distinct = {}, {}
        for table in types:
            kept[table], distinct[table] = _kept(table, counters.merged(table), min_count)
        spilled, runs = counters.spilled, counters.runs
    means = {name: moment.result(name) for name, moment in moments.items()}
    save(out, Facts(types, min_count, samples, means), kept)
    rows = {table: len(keys) + FIRST for table, (keys, _) in kept.items()}
    return {
        "samples": samples,
        "bad_rows_skipped": files.bad_rows,
        "first_bad_row": files.first_bad_row,
        "distinct": distinct,
        "rows": rows,
        "means": means,
        "spilled_bytes": spilled,
        "runs": runs,
    }


def _kept(
    table: str, merged: Iterator[tuple[np.ndarray, np.ndarray]], min_count: int
) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """Return the fingerprints that occur often enough, the most frequent first (ties by fingerprint), with their counts; and
    the number of distinct fingerprints."""
    keys, counts, distinct = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0
    for some, times in merged:
        distinct += len(some)
        often = times >= min_count
        keys.append(np.array(some[often]))
        counts.append(np.array(times[often]))
    found, times = np.concatenate(keys), np.concatenate(counts)
    if len(found) > MOST:
        raise ValueError(f"table {table!r} would have {len(found):,} rows, more than 2**31: set a larger min_count")
    order = np.lexsort((found, np.iinfo(np.int64).max - times.astype(np.int64)))
    return (found[order], times[order]), distinct


class Moments:
    """Mean and standard deviation of numbers that arrive in pieces, without NaN; merged as Chan, Golub and LeVeque do.

    >>> moments = Moments()
    >>> moments.add(np.array([1.0, np.nan]))
    >>> moments.add(np.array([3.0]))
    >>> moments.result("x")
    (2.0, 1.0)
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        """Add more numbers."""
        values = values[~np.isnan(values)].astype(np.float64)
        n = len(values)
        if n:
            mean = float(values.mean())
            shift = mean - self.mean
            self.squares += float(((values - mean) ** 2).sum()) + shift * shift * self.count * n / (self.count + n)
            self.mean += shift * n / (self.count + n)
            self.count += n

    def result(self, name: str) -> tuple[float, float]:
        """Return the mean and the standard deviation. Raise if all numbers of column `name` are equal."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 0.0
        if not deviation > 0:
            raise ValueError(
                f"dense column {name!r} has one value only: there is nothing to standardise, set transform to none"
            )
        return self.mean, deviation
