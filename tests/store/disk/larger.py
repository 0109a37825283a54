"""Train rows on disk that take many times the memory that the process may use, and compare a sample with the reference.

    python -m tests.store.disk.larger FOLDER [GIGABYTES [MIB]]

The system enforces the limit (RLIMIT_DATA) on private writable memory, touched or not; not on the page cache, which it can
take back, nor on shared code of libraries. Unlike a cgroup it needs no privileges.

Gradients are drawn from the batch's number, so the plain reference can compute a sample of rows alone. Prints one line of
JSON at the end.
"""

import json
import resource
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import skirl
from skirl.core.reference import Reference
from skirl.store import DiskStore, Record
from tests.store.disk.crashing import check

MIB = 1 << 20
_given = sys.argv[2:4] if __name__ == "__main__" else []
GIGABYTES, LIMIT = map(float, (*_given, *(0.4, 1024)[len(_given) :]))
DIM, BATCH, FRESH = 64, 8192, 8192 * 15 // 16
RECORD = 4 * (DIM + 1)
TOUCHED = int(GIGABYTES * 1e9) // RECORD
ROWS = TOUCHED * 4 // 3 | 1
STEPS = -(-TOUCHED // FRESH)
TABLE, OPTIMIZER = skirl.Table("row", rows=ROWS, dim=DIM), skirl.RowwiseAdagrad(lr=0.1)


def numbers(step: int) -> np.ndarray:
    """Return a batch's rows, numbered by first touch: of 16, 15 were not used before, and one was."""
    first = step * FRESH
    new = np.arange(first, min(first + FRESH, TOUCHED))
    return np.concatenate([new, np.random.default_rng((1, step)).integers(0, new[-1] + 1, BATCH - FRESH)])


def ids(of: np.ndarray) -> np.ndarray:
    """Spread numbers over the table, one to one as long as the factor, which is prime, does not divide the rows."""
    return of * 2_654_435_761 % ROWS


def gradients(step: int, n: int) -> np.ndarray:
    draws = np.random.default_rng((2, step)).integers(-8, 9, (n, 1))
    return draws.astype(np.float32) / 16 * np.linspace(-1, 1, DIM, dtype=np.float32)


class Stream:
    def __iter__(self) -> Iterator[skirl.KeyedJagged]:
        for step in range(STEPS):
            yield skirl.KeyedJagged.one_hot(["row"], torch.from_numpy(ids(numbers(step)))[:, None])


def opened(folder: Path) -> DiskStore:
    return DiskStore(folder / "rows", {0: Record(DIM + 1)}, rows={0: ROWS})


def train(folder: Path) -> dict[str, object]:
    store, peak = opened(folder), 0
    model = skirl.EmbeddingBagCollection([TABLE], optimizer=OPTIMIZER, cache=4 * BATCH, store=store, seed=5)
    with skirl.lookahead(Stream(), model, sparse=lambda batch: batch, depth=8) as batches:
        for batch in batches:
            out = model(batch)["row"]
            out.backward(torch.from_numpy(gradients(batches.step - 1, len(out))))
            status = Path("/proc/self/status").read_text().splitlines()
            peak = max(peak, next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData")))
    model.flush()
    held = len(store)
    found = {
        "rows": held,
        "gigabytes": round(held * RECORD / 1e9, 2),
        "limit_mib": int(LIMIT),
        "private_mib_at_most": peak // MIB,
        "index_bytes_a_row": round(sum(of.nbytes for log in store._logs for of in log.index._table.arrays) / held, 2),
        "disk_bytes_to_payload": round(store._cleaner.held / (held * RECORD), 3),
        "rows_fetched": model.engine.counters.fetched,
    }
    model.close()
    return found


def compared(folder: Path, held: int) -> dict[str, int]:
    every, reference = max(1, held // 20_000), Reference([TABLE], OPTIMIZER, seed=5)
    for step in range(STEPS):
        of = numbers(step)
        mine = np.flatnonzero(of % every == 3 % every)
        if mine.size:
            reference.forward({"row": (ids(of[mine]).tolist(), range(mine.size + 1), None)})
            reference.backward({"row": gradients(step, len(of))[mine]})
    sample = np.array(sorted(reference.rows))
    found = np.empty((sample.size, DIM + 1), np.float32)
    with opened(folder) as again:
        check(again)
        assert len(again) == held and again.read(sample, found).all()
    expected = np.stack([reference.rows[key] for key in sample.tolist()])
    differing = (found.view(np.uint32) != expected.view(np.uint32)).any(1).sum()
    return {"rows_compared": int(sample.size), "rows_differing": int(differing)}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (int(LIMIT) * MIB,) * 2)
    threading.stack_size(MIB)  # a stack counts in full: 8 MiB for each of some 20 threads, by default
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    where.mkdir(parents=True)
    try:
        result = train(where)
        print(json.dumps(result | compared(where, int(str(result["rows"])))))
    finally:
        shutil.rmtree(where)
