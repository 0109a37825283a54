"""Compiled loops of benchmarks, apart from their flags, which are read without Numba."""

from typing import Any

import numpy as np

from skirl.core.initial import mix
from skirl.core.keys import MAX_ROWS
from skirl.store.disk.records import fill
from skirl.tools.jit import kernel


@kernel
def hash_rows(values, batch):
    """Replace each row by a hash of its table and row, in place."""
    for p in range(len(values)):
        stream = np.uint64(p // batch) << np.uint64(48) | np.uint64(values[p])
        values[p] = np.int64(mix(stream) & np.uint64(MAX_ROWS - 1))


@kernel
def plain_reads(file: Any, records: Any, record_bytes: Any, out: Any, lo: int, hi: int) -> None:
    """Read records `lo` to `hi` of a file into `out`, one call of the system for each."""
    words = record_bytes // 4
    data = out.view(np.uint32)
    for i in range(lo, hi):
        fill(file, data[i * words : (i + 1) * words], record_bytes, records[i] * record_bytes)
