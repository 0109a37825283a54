"""Claim: the disk store reads and writes rows at the rates that the device allows ("Disk store" in docs/performance.md).

Device and store are measured in the same run on the same folder; `ratios` compares them.
"""

import os
import secrets
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
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
    room: float = 1.5
    """Maximum bytes on disk per byte of rows."""

    def run(self) -> dict[str, Any]:
        """Measure the device, then the store."""
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
        rng = np.random.default_rng(0)
        piece = np.frombuffer(rng.bytes(_PIECE), np.uint8)
        with Handle(files, lambda: files.create(path)) as file:
            with Stopwatch() as written:
                for offset in range(0, total, _PIECE):
                    files.write(file.number, piece.data, offset)
                    files.send(file.number, offset, _PIECE)
                files.sync(file.number)
            data = np.zeros(self.batch * self.width, np.float32)
            _forget(self.folder)
            pool = Threads()
            rates = {}
            for state in ("cold", "warm"):
                times = []
                for _ in range(self.calls if state == "cold" else self.calls + 1):
                    records = rng.choice(self.rows, self.batch, replace=False)
                    if state == "cold":
                        _forget(self.folder)
                    else:
                        plain_reads(file.number, records, 4 * self.width, data, 0, self.batch)
                    given = file.number, records, 4 * self.width, data
                    with Stopwatch() as watch:
                        run(plain_reads, self.batch, *given, threads=READERS, pool=pool)
                    times.append(watch.seconds)
                rates[state] = self.batch / statistics.median(times)
            times, row = [], piece[: 4 * self.width].tobytes()
            for _ in range(min(self.calls, 5)):
                places = (rng.choice(self.rows, self.batch, replace=False) * 4 * self.width).tolist()
                with Stopwatch() as watch:
                    for place in places:
                        os.pwrite(file.number, row, place)
                    files.sync(file.number)
                times.append(watch.seconds)
        path.unlink()
        return {
            "sequential_write_mb_s": round(total / written.seconds / 1e6, 1),
            "random_read_cold_rows_s": round(rates["cold"]),
            "random_read_warm_rows_s": round(rates["warm"]),
            "random_write_rows_s": round(self.batch / statistics.median(times)),
        }

    def _store(self) -> dict[str, Any]:
        rng = np.random.default_rng(1)
        keys = rng.permutation(self.rows) * _KEEP
        rows, out = rng.random((self.batch, self.width), np.float32), np.empty((self.batch, self.width), np.float32)
        self._compile(rows)
        counting = _Counting()
        path = self.folder / "store"
        store = self._open(path, counting)
        with Stopwatch() as filled:
            for i in range(0, keys.size, self.batch):
                part = keys[i : i + self.batch]
                store.write(part, rows[: part.size])
            store.flush()

        def some() -> np.ndarray:
            return keys[rng.choice(self.rows, self.batch, replace=False)]

        def read(cold: bool) -> float:
            wanted = some()
            if cold:
                _forget(path)
            else:
                store.read(wanted, out)
            return seconds(store.read, wanted, out)

        cold = statistics.median(read(True) for _ in range(self.calls))
        warm = statistics.median(read(False) for _ in range(self.calls))
        index = sum(log.index.nbytes for log in store._logs) / self.rows
        before, most = counting.written, 0
        turns = max(1, round(2 * self.rows / self.batch))
        with Stopwatch() as overwritten:
            for _ in range(turns):
                store.write(some(), rows)
                most = max(most, store.bytes_on_disk)
            store.flush()
        payload = turns * self.batch * 4 * self.width
        store.close()
        return {
            "fill": self._rate(self.rows, filled.seconds),
            "read_cold": self._rate(self.batch, cold),
            "read_warm": self._rate(self.batch, warm),
            "overwrite": self._rate(turns * self.batch, overwritten.seconds)
            | {"amplification": round((counting.written - before) / payload, 3)},
            "index_bytes_a_row": round(index, 2),
            "disk_bytes_to_payload": round(most / (self.rows * 4 * self.width), 3),
        }

    def _open(self, path: Path, files: OsFiles) -> DiskStore:

        layout, rows = {0: Record(self.width)}, {0: self.rows * _KEEP}
        return DiskStore(path, layout, rows=rows, room=self.room, files=files)

    def _compile(self, rows: np.ndarray) -> None:
        path = self.folder / secrets.token_hex(4)
        with self._open(path, OsFiles()) as store:
            keys = np.arange(self.batch)
            for i in range(4):
                store.write(keys[i:], rows[i:])
            store.read(keys, np.empty_like(rows))
        shutil.rmtree(path)

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
    for path in folder.iterdir():
        if path.is_file():
            with Handle(OsFiles(), lambda: os.open(path, os.O_RDONLY)) as file:  # noqa: B023 - called at once
                os.fdatasync(file.number)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main(Disk)
