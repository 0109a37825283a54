"""Train rows on disk that take many times the memory that the process may use, and compare a sample with the reference.

    python -m tests.store.disk.larger FOLDER --gigabytes 20 --limit 1024

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
import threading
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
    parser.add_argument("--limit", type=int, default=1024, help="MiB of private memory that the process may have")
    parser.add_argument("--batch", type=int, default=8192)
    given = parser.parse_args()
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

    def train(stream: Stream, store: DiskStore) -> tuple[int, skirl.EmbeddingBagCollection]:
        model, peak = embeddings(stream, store), 0
        with skirl.lookahead(stream, model, sparse=lambda ids: ids, depth=8) as batches:
            for ids in batches:
                out = model(ids)["row"]
                out.backward(torch.from_numpy(stream.gradients(batches.step - 1, len(out))))
                peak = max(peak, status("VmData"))
        model.flush()
        return peak, model

    torch.set_num_threads(1)
    optimizer = skirl.RowwiseAdagrad(lr=0.1)
    tables = {0: Record(DIM + 1)}
    stream = Stream(int(given.gigabytes * 1e9) // RECORD, given.batch)
    store = DiskStore(given.folder / "rows", tables, rows={0: stream.rows})
    peak, model = train(stream, store)
    held, fetched = len(store), model.engine.counters.fetched
    index = sum(log.index.nbytes for log in store._logs)
    on_disk = store.bytes_on_disk
    model.close()
    with DiskStore(given.folder / "rows", tables, rows={0: stream.rows}) as again:
        assert again.check() == held
        every = max(1, held // 20_000)
        reference = Reference([skirl.Table("row", rows=stream.rows, dim=DIM)], optimizer, seed=5)
        for step in range(stream.steps):
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
        "limit_mib": given.limit,
        "private_mib_at_most": peak // MIB,
        "index_bytes_a_row": round(index / held, 2),
        "disk_bytes_to_payload": round(on_disk / (held * RECORD), 3),
        "rows_fetched": fetched,
        "rows_compared": int(sample.size),
        "rows_differing": differing,
    }


if __name__ == "__main__":
    main()
