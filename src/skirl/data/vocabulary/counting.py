"""Makes a vocabulary: after one pass over the data, the ids that occurred often enough get rows of their own."""

from typing import Any

import numpy as np

from skirl.data.files.stream import Files
from skirl.data.vocabulary.vocabulary import FIRST, MOST, Facts, save
from skirl.tools.progress import progress_of

Counted = tuple[np.ndarray, np.ndarray]
"""Fingerprints, each once in ascending order, and how often each occurred (uint64)."""
_AT_ONCE = 1 << 20  # fingerprints to sort at a time, at least


def count(files: Files, out: str, min_count: int) -> dict[str, Any]:
    """Count the ids of files, which are read as fingerprints, and write the vocabulary."""
    columns = files.encoder.schema
    types = columns.kinds
    hashed = [(column.table or column.name, k) for k, column in enumerate(columns.ids) if column.encode == "hash"]
    samples, counts = 0, {table: Counts() for table in types}
    with progress_of("count") as progress:
        for number, piece in enumerate(files.pieces(), start=1):
            for table, k in hashed:
                counts[table].add(piece.ids[k].expanded().values.view(np.uint64))
            samples += len(piece)
            facts = {"samples": f"{samples:,}"}
            progress(number, lambda facts=facts: facts)
    distinct = {table: len(of.counted()[0]) for table, of in counts.items()}
    kept = {table: _kept(table, of.counted(), min_count) for table, of in counts.items()}
    save(out, Facts(types, min_count, samples), kept)
    return {
        "samples": samples, "bad_rows_skipped": files.bad_rows, "first_bad_row": files.first_bad_row, "distinct": distinct,
        "rows": {table: len(keys) + FIRST for table, (keys, _) in kept.items()},
    }  # fmt: skip


def _kept(table: str, counted: Counted, min_count: int) -> Counted:
    """The fingerprints that occur often enough, the most frequent first (ties by fingerprint), with their counts."""
    keys, times = (array[counted[1] >= min_count] for array in counted)
    if len(keys) > MOST:
        raise ValueError(f"table {table!r} would have {len(keys):,} rows, more than 2**31: set a larger min_count")
    order = np.lexsort((keys, np.iinfo(np.int64).max - times.astype(np.int64)))
    return keys[order], times[order]


class Counts:
    """Exact counts of a table's fingerprints: 16 bytes for each distinct one, and three times that while it merges."""

    def __init__(self) -> None:
        none = np.empty(0, np.uint64)
        self._counted: Counted = none, none
        self._new: list[np.ndarray] = []
        self._waiting = 0

    def add(self, fingerprints: np.ndarray) -> None:
        """0 is not counted."""
        self._new.append(fingerprints[fingerprints != 0])
        self._waiting += len(self._new[-1])
        if self._waiting > max(_AT_ONCE, len(self._counted[0])):  # so that merging takes its share of the time, no more
            self.counted()

    def counted(self) -> Counted:
        if self._new:
            new = np.unique(np.concatenate(self._new), return_counts=True)
            keys, times = (np.concatenate([old, of.astype(np.uint64)]) for old, of in zip(self._counted, new))
            order = np.argsort(keys, kind="stable")  # merges stretches that are sorted
            keys, times = keys[order], times[order]
            first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
            self._counted = keys[first], np.add.reduceat(times, first) if len(first) else times
            self._new, self._waiting = [], 0
        return self._counted
