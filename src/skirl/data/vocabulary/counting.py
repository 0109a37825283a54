"""Counts exactly how often each value occurs, in bounded memory.

When the tables fill their memory, they are sorted and spilled to disk as a run; the runs are merged at the end.
"""

import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from skirl.data.vocabulary.vocabulary import SMALLEST, Slots, places_for, probe
from skirl.tools.jit import kernel
from skirl.tools.os_errors import writing

ENTRY = 12
"""Bytes of one table entry: a fingerprint and a count."""


class Counter(Slots):
    """Counts of one table's fingerprints."""

    def __init__(self) -> None:
        super().__init__(counts=np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of the hash table."""
        return len(self.keys) * ENTRY

    def grown(self, more: int) -> int:
        """Return the bytes that the hash table needs to hold `more` further keys."""
        return max(len(self.keys), places_for(self.used + more)) * ENTRY

    def add(self, fingerprints: np.ndarray) -> None:
        """Count each occurrence of the fingerprints."""
        self.reserve(len(fingerprints))
        self.used += _count(self.keys, self.numbers["counts"], fingerprints)

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the fingerprints in ascending order, and how often each occurred."""
        held = self.entries()
        order = np.argsort(held["keys"])
        return held["keys"][order], held["counts"][order].astype(np.uint64)


class FingerprintCounts:
    """Counts of several tables' fingerprints in bounded memory. A context manager, since it may spill to disk.

    >>> with FingerprintCounts(["a"], memory=1 << 20) as counters:
    ...     counters.add("a", np.array([7, 9, 7], np.uint64))
    ...     [(keys.tolist(), counts.tolist()) for keys, counts in counters.merged("a")]
    [([7, 9], [2, 1])]
    """

    def __init__(self, tables: list[str], memory: int, folder: Path | None = None) -> None:
        """Set bounds. memory: bytes for all tables together. folder: where to spill runs; None for the system's temporary
        folder."""
        self._counters = {table: Counter() for table in tables}
        self._memory = max(memory, 2 * SMALLEST * ENTRY * len(tables))
        self._parent = folder
        self._folder: Path | None = None
        self._runs: dict[str, list[tuple[Path, Path]]] = {table: [] for table in tables}
        self.spilled = 0
        """Bytes written to disk."""
        self.runs = 0

    def __enter__(self) -> "FingerprintCounts":
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, table: str, fingerprints: np.ndarray) -> None:
        """Count fingerprints of a table. 0 is not counted."""
        counter = self._counters[table]
        # A growing table keeps its old arrays until it has copied them.
        others = sum(c.nbytes for c in self._counters.values())
        size = counter.grown(len(fingerprints))
        if size > counter.nbytes and others + size > self._memory and others > len(self._counters) * SMALLEST * ENTRY:
            self._spill()
        counter.add(fingerprints)

    def merged(self, table: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield all fingerprints of a table in ascending order with their counts, in pieces."""
        if not self._runs[table]:
            yield self._counters[table].sorted()
            return
        self._spill()
        runs = [
            (np.load(keys, mmap_mode="r", allow_pickle=False), np.load(counts, mmap_mode="r", allow_pickle=False))
            for keys, counts in self._runs[table]
        ]
        entries = sum(len(keys) for keys, _ in runs)
        slices = max(1, -(-entries * 64 // self._memory))  # sorting holds each entry about three times
        edges = [int(edge) for edge in np.linspace(0, 2.0**64, slices + 1)]
        for low, high in pairwise(edges):
            keys, counts = [], []
            for run_keys, run_counts in runs:
                begin = int(np.searchsorted(run_keys, np.uint64(low)))
                end = len(run_keys) if high >= 2**64 else int(np.searchsorted(run_keys, np.uint64(high)))
                keys.append(run_keys[begin:end])
                counts.append(run_counts[begin:end])
            yield _summed(np.concatenate(keys), np.concatenate(counts))

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="skirl-vocab-", dir=self._parent))
        for number, (table, counter) in enumerate(self._counters.items()):
            keys, counts = counter.sorted()
            paths = (self._folder / f"{self.runs}-{number}-keys.npy", self._folder / f"{self.runs}-{number}-counts.npy")
            for path, values in zip(paths, (keys, counts)):
                with writing(path):
                    np.save(path, values, allow_pickle=False)
                self.spilled += values.nbytes
            self._runs[table].append(paths)
            counter.clear()
        self.runs += 1


def _summed(keys: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each key once, in ascending order, with the sum of its counts."""
    if not len(keys):
        return keys, counts
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.add.reduceat(counts, first)


@kernel
def _count(keys, counts, more):
    """Count fingerprints in a hash table, and return how many were new. Counts saturate."""
    new = 0
    for i in range(more.size):
        key = more[i]
        if key == 0:
            continue
        place = probe(keys, key)
        if keys[place] == 0:
            keys[place] = key
            new += 1
        counts[place] = np.uint32(min(np.uint64(counts[place]) + np.uint64(1), np.uint64(0xFFFFFFFF)))
    return new
