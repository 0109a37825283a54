"""Claim: the disk store reads and writes rows at the rates that the device allows ("Disk store" in docs/performance.md).

Device and store are measured in the same run on the same folder; `ratios` compares them.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common import Bench, Stopwatch, main, result, seconds
from skirl.store import DiskStore, Record
from skirl.store.disk.os_files import Handle, OsFiles
from skirl.store.disk.records import READERS, fill
from skirl.tools.jit import kernel
from skirl.tools.threads import Threads, run

_PIECE = 4 << 20
_KEEP = 7  # the store holds every 7th row of the table: ids of real tables are sparse, too


@dataclass(frozen=True)
class Disk(Bench):
    """Rates of reading and writing rows through the disk store, against the device's own rates."""

    folder: Path = Path("skirl-bench-disk")
    """Where to measure, in a new folder that is removed afterwards."""
    rows: int = 1_000_000
    """Rows in the store."""
    width: int = 65
    """Floats in a record; 65 is a row of 64 with its state."""
    batch: int = 16_384
    """Rows in a call."""
    calls: int = 20
    """Calls of each kind; the median is reported."""

    def run(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True)
        try:
            device = self._device()
            store = self._store()
        finally:
            shutil.rmtree(self.folder)
        return result(
            "disk", self, "rows width batch", device=device, store=store,
            ratios={
                "fill_to_sequential_write": round(store["fill"]["mb_s"] / device["sequential_write_mb_s"], 3),
                "overwrite_to_pwrite": round(store["overwrite"]["rows_s"] / device["random_write_rows_s"], 3),
                "cold_read_to_pread": round(store["read_cold"]["rows_s"] / device["random_read_cold_rows_s"], 3),
                "warm_read_to_pread": round(store["read_warm"]["rows_s"] / device["random_read_warm_rows_s"], 3),
            },
        )  # fmt: skip

    def _device(self) -> dict[str, float]:
        files, path = OsFiles(), self.folder / "file"
        total = -(-self.rows * 4 * self.width // _PIECE) * _PIECE
        piece = np.frombuffer(np.random.default_rng(0).bytes(_PIECE), np.uint8)
        data, pool, width = np.zeros(self.batch * self.width, np.float32), Threads(), 4 * self.width
        with Handle(files, lambda: files.create(path)) as file:
            with Stopwatch() as written:
                for offset in range(0, total, _PIECE):
                    files.write(file.number, piece.data, offset)
                files.sync(file.number)

            def read(records: np.ndarray) -> None:
                run(plain_reads, self.batch, file.number, records, width, data, threads=READERS, pool=pool)

            def overwrite(records: np.ndarray) -> None:
                for place in (records * width).tolist():
                    os.pwrite(file.number, piece[:width], place)
                files.sync(file.number)

            cold, warm = self._read(read, self.folder)
            overwritten = median(seconds(overwrite, picks) for picks in self._picks(min(self.calls, 5)))
        path.unlink()
        return {
            "sequential_write_mb_s": round(total / written.seconds / 1e6, 1),
            "random_read_cold_rows_s": round(self.batch / cold),
            "random_read_warm_rows_s": round(self.batch / warm),
            "random_write_rows_s": round(self.batch / overwritten),
        }

    def _store(self) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        keys = rng.permutation(self.rows) * _KEEP
        rows, out = rng.random((self.batch, self.width), np.float32), np.empty((self.batch, self.width), np.float32)
        with self._open(self.folder / "compiled", OsFiles()) as store:
            for i in range(4):
                store.write(np.arange(i, self.batch), rows[i:])
            store.read(np.arange(self.batch), out)
        counting, path = _Counting(), self.folder / "store"
        with self._open(path, counting) as store:
            with Stopwatch() as filled:
                for i in range(0, keys.size, self.batch):
                    part = keys[i : i + self.batch]
                    store.write(part, rows[: part.size])
                store.flush()
            cold, warm = self._read(lambda picks: store.read(keys[picks], out), path)
            index = sum(of.nbytes for log in store._logs for of in log.index._table.arrays) / self.rows
            before, most, turns = counting.written, 0, max(1, round(2 * self.rows / self.batch))
            with Stopwatch() as overwritten:
                for picks in self._picks(turns):
                    store.write(keys[picks], rows)
                    most = max(most, store._cleaner.held)
                store.flush()
        payload = turns * self.batch * 4 * self.width
        return {
            "fill": self._rate(self.rows, filled.seconds),
            "read_cold": self._rate(self.batch, cold),
            "read_warm": self._rate(self.batch, warm),
            "overwrite": self._rate(turns * self.batch, overwritten.seconds)
            | {"amplification": round((counting.written - before) / payload, 3)},
            "index_bytes_a_row": round(index, 2),
            "disk_bytes_to_payload": round(most / (self.rows * 4 * self.width), 3),
        }

    def _picks(self, count: int) -> Iterator[np.ndarray]:
        """Yield random rows of a call."""
        rng = np.random.default_rng(2)
        return (rng.choice(self.rows, self.batch, replace=False) for _ in range(count))

    def _read(self, read: Callable[[np.ndarray], Any], folder: Path) -> tuple[float, float]:
        """Return the median seconds of reading random rows that are not in the page cache, and of rows that are."""
        cold, warm = list[float](), list[float]()
        for picks in self._picks(self.calls):
            _forget(folder)
            cold.append(seconds(read, picks))
            warm.append(seconds(read, picks))
        return median(cold), median(warm)

    def _open(self, path: Path, files: OsFiles) -> DiskStore:
        layout, rows = {0: Record(self.width)}, {0: self.rows * _KEEP}
        return DiskStore(path, layout, rows=rows, files=files)

    def _rate(self, rows: int, took: float) -> dict[str, float]:
        return {"rows_s": round(rows / took), "mb_s": round(rows * 4 * self.width / took / 1e6, 1)}


@kernel
def plain_reads(file: Any, records: Any, record_bytes: Any, out: Any, lo: int, hi: int) -> None:
    """Read records `lo` to `hi` of a file into `out`, one call of the system for each."""
    words = record_bytes // 4
    data = out.view(np.uint32)
    for i in range(lo, hi):
        fill(file, data[i * words : (i + 1) * words], record_bytes, records[i] * record_bytes)


class _Counting(OsFiles):
    """Files that count the bytes written."""

    written = 0

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        super().write(file, data, offset)
        self.written += memoryview(data).nbytes


def _forget(folder: Path) -> None:
    """Sync all files of a folder to disk and drop them from the page cache."""
    for path in filter(Path.is_file, folder.iterdir()):
        with path.open() as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main(Disk)
