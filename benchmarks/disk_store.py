"""Rows a second, bytes on disk and bytes of memory of the disk store, beside the memory store in the same run.

    python benchmarks/disk_store.py --rows 1000000 --width 65 --batch 16384 --folder /somewhere/on/the/disk

Ends with one line of JSON. "cold": the page cache forgot the store's files before each call (posix_fadvise), so rows come
from the disk, or from what is behind it. On-disk bytes are those of `du`, at their highest after any call.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from skirl.store import DiskStore, MemoryStore, Record, Store


def memory() -> int:
    """Bytes of anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def forget(folder: Path) -> None:
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def fill(store: Store, keys: np.ndarray, rows: np.ndarray) -> float:
    """Rows a second of first writes."""
    start = time.perf_counter()
    for i in range(0, keys.size, len(rows)):
        part = keys[i : i + len(rows)]
        store.write(part, rows[: part.size])
    return keys.size / (time.perf_counter() - start)


def rate(calls: int, batch: int, call) -> float:
    """Median rows a second of a call."""
    times = []
    for _ in range(calls):
        seconds = call()
        times.append(seconds)
    return batch / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=65)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--overwrite", type=float, default=5, help="times that each row is written again, on average")
    parser.add_argument("--folder", type=Path, default=Path("disk-store-benchmark"))
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.permutation(given.rows) * 3
    rows = rng.random((given.batch, given.width), np.float32)
    out = np.empty_like(rows)
    layout = {0: Record(given.width)}
    result: dict[str, object] = {"bench": "disk_store", **{k: v for k, v in vars(given).items() if k != "folder"}}

    def some() -> np.ndarray:
        return keys[rng.choice(given.rows, given.batch, replace=False)]

    def timed(call, *args) -> float:
        start = time.perf_counter()
        call(*args)
        return time.perf_counter() - start

    for name in ("memory", "disk"):
        shutil.rmtree(given.folder, ignore_errors=True)
        warm: Store = MemoryStore(layout) if name == "memory" else DiskStore(given.folder, layout)
        fill(warm, keys[: 4 * given.batch], rows)  # compiles
        warm.read(keys[: given.batch], out)
        warm.flush()
        warm.close()
        shutil.rmtree(given.folder, ignore_errors=True)
        store: Store = MemoryStore(layout) if name == "memory" else DiskStore(given.folder, layout)
        before = memory()
        result[f"{name}_first_writes"] = round(fill(store, keys, rows))
        result[f"{name}_ram_bytes_a_row"] = round((memory() - before) / given.rows, 2)
        result[f"{name}_reads"] = round(rate(given.calls, given.batch, lambda s=store: timed(s.read, some(), out)))
        if isinstance(store, DiskStore):
            result["flush_s"] = round(timed(store.flush), 3)

            def cold(s: DiskStore = store) -> float:
                forget(given.folder)
                return timed(s.read, some(), out)

            result["disk_cold_reads"] = round(rate(given.calls, given.batch, cold))
        worst, times = 0.0, []
        for _ in range(max(1, round(given.overwrite * given.rows / given.batch))):
            times.append(timed(store.write, some(), rows))
            if isinstance(store, DiskStore):
                worst = max(worst, on_disk(given.folder))
        result[f"{name}_writes"] = round(given.batch * len(times) / sum(times))
        result[f"{name}_longest_write_s"] = round(max(times), 3)
        if isinstance(store, DiskStore):
            payload = given.rows * given.width * 4
            result["disk_bytes_per_payload"] = round(worst / payload, 3)
            result["disk_bytes_beyond_slack_per_payload"] = round((worst - (64 << 20)) / payload, 3)
            result["flush_after_one_write_s"] = round(timed(store.flush), 3)
            store.write(some(), rows)
            result["flush_of_one_batch_s"] = round(timed(store.flush), 4)
            result["snapshot_s"] = round(timed(store.snapshot, given.folder.with_suffix(".snapshot")), 3)
            result["check_s"] = round(timed(store.check), 3)
            result["close_s"] = round(timed(store.close), 3)
            forget(given.folder)
            start = time.perf_counter()
            with DiskStore(given.folder, layout) as again:
                result["open_s"] = round(time.perf_counter() - start, 3)
                assert len(again) == given.rows
            shutil.rmtree(given.folder.with_suffix(".snapshot"))
        else:
            store.close()
    shutil.rmtree(given.folder)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
