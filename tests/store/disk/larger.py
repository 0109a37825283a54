"""Train rows on disk that take many times the memory that the process may use, and compare a sample with the reference.

    python -m tests.store.disk.larger FOLDER --gigabytes 20 --limit 1024 --seconds 480

The system enforces the limit (RLIMIT_DATA): allocating beyond it gives a MemoryError. It counts private writable
memory, touched or not, including stacks and the heap. It counts neither the page cache, which the system can take back,
nor the code of libraries (some 120 MB of torch's), which is shared. So it is stricter than a limit on resident
anonymous memory, and unlike a cgroup it needs no privileges.

Gradients are known beforehand: the loss is a sum of outputs with weights drawn from the batch's number. So each row has
its own history, and the plain reference can compute a sample of rows alone, from seeds. Prints one line of JSON at the
end.
"""

import argparse
import json
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
DIM = 64
RECORD = 4 * (DIM + 1)


def status(name: str) -> int:
    """Return a figure in bytes from the process's status, as Linux reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=0.4, help="of rows that are touched, with their state")
    parser.add_argument("--limit", type=int, help="MiB of private memory that the process may have, from its start")
    parser.add_argument("--above", type=int, help="instead: MiB beyond what it has before it trains")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument(
        "--seconds", type=float, default=480, help="no step is begun later; what was touched by then counts"
    )
    given = parser.parse_args()
    if given.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (given.limit * MIB, given.limit * MIB))
    threading.stack_size(MIB)  # a stack counts in full: 8 MiB for each of some 20 threads, by default
    given.folder.mkdir(parents=True)
    try:
        print(json.dumps(measure(given)))
    finally:
        shutil.rmtree(given.folder)


def measure(given: argparse.Namespace) -> dict[str, object]:
    import numpy as np
    import torch

    import skirl
    from skirl.core.reference import Reference
    from skirl.store import DiskStore, Record
    from skirl.store.disk.os_files import OsFiles

    class Counting(OsFiles):
        written = 0

        def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
            super().write(file, data, offset)
            self.written += memoryview(data).nbytes

    @dataclass(frozen=True)
    class Stream:
        """Of every 16 ids in a batch, 15 are of rows not used before, spread over the table; one was used before."""

        touched: int
        batch: int

        @property
        def rows(self) -> int:
            """Number of rows of the table: a third more than are touched."""
            return self.touched * 4 // 3 | 1

        @property
        def fresh(self) -> int:
            return self.batch * 15 // 16

        @property
        def steps(self) -> int:
            return -(-self.touched // self.fresh)

        def numbers(self, step: int) -> np.ndarray:
            """Return the indices of the touched rows, in the order of first touch."""
            rng = np.random.default_rng((1, step))
            first = step * self.fresh
            new = np.arange(first, min(first + self.fresh, self.touched))
            return np.concatenate([new, rng.integers(0, new[-1] + 1, self.batch - self.fresh)])

        def ids(self, numbers: np.ndarray) -> np.ndarray:
            """Map numbers to ids, a bijection as long as the factor, which is prime, does not divide the rows."""
            return numbers * 2_654_435_761 % self.rows

        def gradients(self, step: int, n: int) -> np.ndarray:
            rng = np.random.default_rng((2, step))
            return rng.integers(-8, 9, (n, 1)).astype(np.float32) / 16 * np.linspace(-1, 1, DIM, dtype=np.float32)

        def __iter__(self) -> Iterator[skirl.KeyedJagged]:
            for step in range(self.steps):
                yield skirl.KeyedJagged.one_hot(["row"], torch.from_numpy(self.ids(self.numbers(step)))[:, None])

    def embeddings(stream: Stream, store: str | DiskStore) -> skirl.EmbeddingBagCollection:
        tables = [skirl.Table("row", rows=stream.rows, dim=DIM)]
        return skirl.EmbeddingBagCollection(tables, optimizer=optimizer, cache=4 * stream.batch, store=store, seed=5)

    def train(
        stream: Stream, store: DiskStore, until: float, started: float
    ) -> tuple[int, skirl.EmbeddingBagCollection]:
        model, said = embeddings(stream, store), time.monotonic()
        with skirl.lookahead(stream, model, sparse=lambda ids: ids, depth=8) as batches:
            for ids in batches:
                out = model(ids)["row"]
                out.backward(torch.from_numpy(stream.gradients(batches.step - 1, len(out))))
                peak["data"] = max(peak["data"], status("VmData"))
                peak["anonymous"] = max(peak["anonymous"], status("RssAnon"))
                if time.monotonic() > said + 10:
                    said = time.monotonic()
                    print(
                        f"{said - started:.0f} s: step {batches.step} of {stream.steps}, {peak}",
                        file=sys.stderr,
                        flush=True,
                    )
                if time.monotonic() > until:
                    break
            steps = batches.step
        model.flush()
        return steps, model

    peak = {"data": 0, "anonymous": 0}
    torch.set_num_threads(1)
    optimizer = skirl.RowwiseAdagrad(lr=0.1)
    tables = {0: Record(DIM + 1)}
    if given.above:  # how much memory does training a few rows take?
        small = Stream(20 * given.batch, given.batch)
        warm = DiskStore(given.folder / "warm", tables, rows={0: small.rows})
        train(small, warm, float("inf"), time.monotonic())[1].close()
        shutil.rmtree(given.folder / "warm")
    before = status("VmData")
    if given.above:
        limit = before + given.above * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    device = sequential(given.folder / "device", min(2.0, given.gigabytes))

    stream = Stream(int(given.gigabytes * 1e9) // RECORD, given.batch)
    files = Counting()
    store = DiskStore(given.folder / "rows", tables, rows={0: stream.rows}, files=files)
    started = time.monotonic()
    steps, model = train(stream, store, started + given.seconds, started)
    trained = time.monotonic() - started
    held, counters = len(store), model.engine.counters
    index = sum(log.index.nbytes for log in store._logs)
    on_disk = store.bytes_on_disk
    model.close()
    peak_resident = status("VmHWM")

    began = time.monotonic()
    with DiskStore(given.folder / "rows", tables, rows={0: stream.rows}) as again:
        opened = time.monotonic() - began
        began = time.monotonic()
        assert again.check() == held
        checked = time.monotonic() - began
        every = max(1, held // 20_000)
        reference = Reference([skirl.Table("row", rows=stream.rows, dim=DIM)], optimizer, seed=5)
        for step in range(steps):
            numbers = stream.numbers(step)
            mine = np.flatnonzero(numbers % every == 3 % every)
            if mine.size:
                reference.forward({"row": (stream.ids(numbers[mine]).tolist(), range(mine.size + 1), None)})
                reference.backward({"row": stream.gradients(step, len(numbers))[mine]})
        sample = np.array(sorted(reference.rows))
        found = np.empty((sample.size, DIM + 1), np.float32)
        assert again.read(sample, found).all()
        expected = np.stack([reference.rows[key] for key in sample.tolist()])
        differing = int((found.view(np.uint32) != expected.view(np.uint32)).any(1).sum())
    return {
        "rows": held,
        "gigabytes": round(held * RECORD / 1e9, 2),
        "rows_of_the_table": stream.rows,
        "record_bytes": RECORD,
        "steps": steps,
        "batch": given.batch,
        "limit_mib": limit // MIB,
        "private_mib_before_training": before // MIB,
        "private_mib_at_most": peak["data"] // MIB,
        "anonymous_mib_at_most": peak["anonymous"] // MIB,
        "resident_mib_at_most": peak_resident // MIB,
        "index_bytes_a_row": round(index / held, 2),
        "disk_bytes_to_payload": round(on_disk / (held * RECORD), 3),
        "seconds": round(trained, 1),
        "samples_s": round(steps * given.batch / trained),
        "rows_fetched": counters.fetched,
        "rows_written": counters.written,
        "write_mb_s": round(files.written / trained / 1e6, 1),
        "device": device,
        "write_to_device": round(files.written / trained / 1e6 / device["write_mb_s"], 3),
        "check_mb_s": round(on_disk / checked / 1e6, 1),
        "check_to_device": round(on_disk / checked / 1e6 / device["read_mb_s"], 3),
        "open_s": round(opened, 1),
        "rows_compared": int(sample.size),
        "rows_differing": differing,
    }


def sequential(path: Path, gigabytes: float) -> dict[str, float]:
    """Return MB/s of writing and syncing one file, and of reading it once the page cache has dropped it."""
    import os

    piece, count = bytes(4 * MIB), max(1, int(gigabytes * 1e9) // (4 * MIB))
    rates = {}
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(count):
            file.write(piece)
        os.fsync(file.fileno())
        rates["write_mb_s"] = round(count * len(piece) / (time.monotonic() - began) / 1e6, 1)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    with path.open("rb", buffering=0) as file:
        while file.read(len(piece)):
            pass
    rates["read_mb_s"] = round(count * len(piece) / (time.monotonic() - began) / 1e6, 1)
    path.unlink()
    return rates


if __name__ == "__main__":
    main()
