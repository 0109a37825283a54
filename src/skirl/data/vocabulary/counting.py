"""Makes a vocabulary: after one pass over the data, the ids that occurred often enough get rows of their own."""

import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from skirl.data.open import open_to_count
from skirl.data.vocabulary.vocabulary import FIRST, MOST, Facts, save
from skirl.tools.os_errors import writing
from skirl.tools.progress import progress_of
from skirl.tools.units import size


def count(
    data: str, out: str, *, schema: str | None, valid: str | None, workers: int, skip: bool, min_count: int, memory: int,
    folder: Path | None,
) -> dict[str, Any]:  # fmt: skip
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
    with FingerprintCounts(list(types), memory, folder or Path(out).absolute().parent) as counts:
        with progress_of("count") as progress:
            for number, piece in enumerate(files.pieces(), start=1):
                for table, k in hashed:
                    counts.add(table, piece.ids[k].expanded().values.view(np.uint64))
                at = 0
                for column in columns.dense:
                    if column.name in moments:
                        moments[column.name].add(piece.dense[:, at])
                    at += 1 + column.indicator
                samples += len(piece)
                facts = {"samples": f"{samples:,}", "on disk": size(counts.spilled)}
                progress(number, lambda facts=facts: facts)
        kept, distinct = {}, {}
        for table in types:
            kept[table], distinct[table] = _kept(table, counts.merged(table), min_count)
    means = {name: moment.result(name) for name, moment in moments.items()}
    save(out, Facts(types, min_count, samples, means), kept)
    return {
        "samples": samples, "bad_rows_skipped": files.bad_rows, "first_bad_row": files.first_bad_row, "distinct": distinct,
        "rows": {table: len(keys) + FIRST for table, (keys, _) in kept.items()}, "means": means,
        "spilled_bytes": counts.spilled, "runs": counts.runs,
    }  # fmt: skip


def _kept(
    table: str, merged: Iterator[tuple[np.ndarray, np.ndarray]], min_count: int
) -> tuple[tuple[np.ndarray, np.ndarray], int]:
    """The fingerprints that occur often enough, the most frequent first (ties by fingerprint), with their counts; and the
    number of distinct ones."""
    keys, counts, distinct = [_NONE], [_NONE], 0
    for some, times in merged:
        distinct += len(some)
        often = times >= min_count
        keys.append(some[often])
        counts.append(times[often])
    found, times = np.concatenate(keys), np.concatenate(counts)
    if len(found) > MOST:
        raise ValueError(f"table {table!r} would have {len(found):,} rows, more than 2**31: set a larger min_count")
    order = np.lexsort((found, np.iinfo(np.int64).max - times.astype(np.int64)))
    return (found[order], times[order]), distinct


_NONE = np.empty(0, np.uint64)


class FingerprintCounts:
    """Exact counts of several tables' fingerprints in bounded memory: the rest is spilled to disk as sorted runs."""

    def __init__(self, tables: list[str], memory: int, folder: Path | None = None) -> None:
        """memory: bytes for all tables together. folder: where to spill; None for the system's temporary one."""
        self._memory = max(memory, len(tables) << 15)
        self._new: dict[str, list[np.ndarray]] = {table: [] for table in tables}
        self._new_bytes = 0
        self._counted = dict.fromkeys(tables, (_NONE, _NONE))
        """Fingerprints that were counted: each once in ascending order, and how often it occurred."""
        self._parent, self._folder = folder, None
        self._runs: dict[str, list[Path]] = {table: [] for table in tables}
        self.spilled = self.runs = 0  # bytes and runs written to disk

    def __enter__(self) -> "FingerprintCounts":
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def nbytes(self) -> int:
        """Held between two calls."""
        return self._new_bytes + sum(keys.nbytes + times.nbytes for keys, times in self._counted.values())

    def add(self, table: str, fingerprints: np.ndarray) -> None:
        """0 is not counted."""
        self._new[table].append(fingerprints.copy())
        self._new_bytes += fingerprints.nbytes
        if self._new_bytes > self._memory // 8:  # sorting holds each of them several times
            self._count()
            if self.nbytes > self._memory // 4:
                self._spill()

    def merged(self, table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        self._count()
        runs = [self._counted[table], *(tuple(np.load(run, mmap_mode="r")) for run in self._runs[table])]
        entries = sum(len(keys) for keys, _ in runs)
        slices = max(1, -(-entries * 64 // self._memory)) if len(runs) > 1 else 1
        edges = [int(edge) for edge in np.linspace(0, 2.0**64, slices + 1)]
        for low, high in pairwise(edges):
            keys, times = [], []
            for run_keys, run_times in runs:
                begin = int(np.searchsorted(run_keys, np.uint64(low)))
                end = len(run_keys) if high >= 2**64 else int(np.searchsorted(run_keys, np.uint64(high)))
                keys.append(run_keys[begin:end])
                times.append(run_times[begin:end])
            yield _summed(np.concatenate(keys), np.concatenate(times))

    def _count(self) -> None:
        for table, new in self._new.items():
            if new:
                keys, times = np.unique(np.concatenate(new), return_counts=True)
                some, before = slice(int((keys[:1] == 0).sum()), None), self._counted[table]
                both = zip(before, (keys[some], times[some].astype(np.uint64)), strict=True)
                self._counted[table] = _summed(*map(np.concatenate, both))
                new.clear()
        self._new_bytes = 0

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="skirl-vocab-", dir=self._parent))
        for number, (table, counted) in enumerate(self._counted.items()):
            if len(counted[0]):
                path = self._folder / f"{self.runs}-{number}.npy"
                with writing(path):
                    np.save(path, np.stack(counted))
                self.spilled += 2 * counted[0].nbytes
                self._runs[table].append(path)
                self._counted[table] = _NONE, _NONE
        self.runs += 1


def _summed(keys: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each key once, in ascending order, with the sum of its counts."""
    if not len(keys):
        return keys, times
    order = np.argsort(keys, kind="stable")  # merges stretches that are sorted
    keys, times = keys[order], times[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(times, first)


class Moments:
    """Mean and standard deviation of numbers that arrive in pieces, without NaN; merged as Chan, Golub and LeVeque do."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray) -> None:
        values = values[~np.isnan(values)].astype(np.float64)
        n = len(values)
        if n:
            mean = float(values.mean())
            shift = mean - self.mean
            self.squares += float(((values - mean) ** 2).sum()) + shift * shift * self.count * n / (self.count + n)
            self.mean += shift * n / (self.count + n)
            self.count += n

    def result(self, name: str) -> tuple[float, float]:
        """The mean and the standard deviation. Raise if all numbers of column `name` are equal."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 0.0
        if not deviation > 0:
            raise ValueError(
                f"dense column {name!r} has one value only: there is nothing to standardise, set transform to none"
            )
        return self.mean, deviation
