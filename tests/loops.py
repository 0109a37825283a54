"""A small loop over a small stream, its reference, and stores, loaders and threads that tests can watch and break."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import skirl
from skirl import Batch, KeyedJagged, Table
from skirl.core.optim import RowOptimizer
from skirl.core.reference import Bags, Reference
from skirl.core.tables import Schema
from skirl.engine.access import peek
from skirl.pipeline.stages import StageHook
from skirl.store import MemoryStore, Record

TABLES = (
    Table("a", rows=40, dim=3, features=("a1", "a2")),
    Table("b", rows=30, dim=3, pooling="mean"),
    Table("c", rows=20, dim=4),
)
FEATURES = Schema.of(TABLES).features
OPTIMIZER = skirl.Adagrad(lr=0.1)
SIZE = 2
"""Samples per batch: with bags of 1 or 2 ids, at most 12 rows of dim 3 and 4 of dim 4."""
CACHE = 26
"""Rows in the cache: with this stream about half of the rows of a step come from the store."""


def stream(count: int, seed: int = 0) -> tuple[list[Batch], list[dict[str, Bags]]]:
    """Return batches, and the same batches in the reference's format."""
    rng = np.random.default_rng(seed)
    rows = {name: table.rows for table in TABLES for name in table.features}
    batches, bags = [], []
    for _ in range(count):
        given: dict[str, Bags] = {}
        values, lengths = [], []
        for name in FEATURES:
            sizes = rng.integers(1, 3, SIZE)
            ids = rng.integers(0, rows[name], sizes.sum())
            given[name] = (ids.tolist(), np.concatenate([[0], np.cumsum(sizes)]).tolist(), None)
            values.append(ids)
            lengths.append(sizes)
        ids, sizes = torch.from_numpy(np.concatenate(values)), torch.from_numpy(np.concatenate(lengths))
        batches.append(Batch(torch.zeros(SIZE, 1), KeyedJagged(FEATURES, ids, lengths=sizes), torch.zeros(SIZE)))
        bags.append(given)
    return batches, bags


def collection(
    store: Any = "memory", cache: Any = CACHE, optimizer: RowOptimizer = OPTIMIZER, **options: Any
) -> skirl.EmbeddingBagCollection:
    return skirl.EmbeddingBagCollection(TABLES, optimizer=optimizer, cache=cache, store=store, **options)


def train(embeddings: skirl.EmbeddingBagCollection, batch: Batch, factor: float = 1.0) -> None:
    """Train one step. The loss is half the sum of squares, so the gradient of an output is the output."""
    out = embeddings(batch.sparse)
    (sum((out[name] * out[name]).sum() for name in FEATURES) * 0.5 * factor).backward()


def loop(batches: Iterable[Batch], embeddings: skirl.EmbeddingBagCollection) -> int:
    steps = 0
    for batch in batches:
        train(embeddings, batch)
        steps += 1
    return steps


def every_row(embeddings: skirl.EmbeddingBagCollection) -> np.ndarray:
    """Return all rows of all tables with their current state, in one array of bytes."""
    parts = []
    for bank, members in enumerate(embeddings.engine.schema.banks):
        for t in members.tables:
            keys = (np.int64(t) << 48) + np.arange(TABLES[t].rows, dtype=np.int64)
            parts.append(peek(embeddings.engine, keys, bank).reshape(-1))
    return np.concatenate(parts).view(np.uint8)


def hooked(hook: StageHook | None, *args: Any, **options: Any) -> skirl.Lookahead:
    """Return `skirl.lookahead` with a hook that its signature does not expose."""
    ahead = skirl.lookahead(*args, **options)
    ahead.hook = hook
    return ahead


class Replay:
    """The reference's rows after any number of steps."""

    def __init__(
        self, bags: Sequence[dict[str, Bags]], optimizer: RowOptimizer = OPTIMIZER, factor: float = 1.0
    ) -> None:
        self._bags = bags
        self._factor = factor
        self._reference = Reference(TABLES, optimizer)
        self._states = [self._state()]

    def after(self, steps: int) -> np.ndarray:
        while len(self._states) <= steps:
            out = self._reference.forward(self._bags[len(self._states) - 1])
            self._reference.backward({name: grad * np.float32(self._factor) for name, grad in out.items()})
            self._states.append(self._state())
        return self._states[steps]

    def check(self, embeddings: skirl.EmbeddingBagCollection, steps: int) -> None:
        assert every_row(embeddings).tobytes() == self.after(steps).tobytes(), f"not the rows after {steps} steps"

    def find(self, embeddings: skirl.EmbeddingBagCollection, candidates: Iterable[int]) -> int:
        """Return how many steps lead to these rows."""
        now = every_row(embeddings).tobytes()
        for steps in candidates:
            if now == self.after(steps).tobytes():
                return steps
        raise AssertionError(f"the rows are those of no number of steps in {list(candidates)}")

    def _state(self) -> np.ndarray:
        parts = []
        for bank in Schema.of(TABLES).banks:
            for t in bank.tables:
                keys = [t << 48 | row for row in range(TABLES[t].rows)]
                held = self._reference._records(t, keys, keep=False)
                parts.append(np.concatenate([held[key] for key in keys]))
        return np.concatenate(parts).view(np.uint8)


class ProbedStore(MemoryStore):
    """A store that first calls `on_read` or `on_write` with the number of the call; these may sleep or raise."""

    def __init__(self, optimizer: RowOptimizer = OPTIMIZER) -> None:
        super().__init__({t: Record(optimizer.width(table.dim)) for t, table in enumerate(TABLES)})
        self.on_read: Callable[[int], None] = lambda number: None
        self.on_write: Callable[[int], None] = lambda number: None
        self.reads = self.writes = 0

    def read(self, keys: Any, out: Any) -> Any:
        self.reads += 1
        self.on_read(self.reads)
        return super().read(keys, out)

    def write(self, keys: Any, rows: Any) -> int:
        self.writes += 1
        self.on_write(self.writes)
        return super().write(keys, rows)


class Broken(Exception):
    """The error that tests raise in other people's code."""


def fail_at(number: int) -> Callable[[int], None]:
    def probe(now: int) -> None:
        if now == number:
            raise Broken(f"call {now}")

    return probe


class Hang:
    """A probe that hangs at one call until it is released."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, now: int) -> None:
        if now == self._number:
            self.reached.set()
            self.go.wait(60)


def our_threads() -> list[str]:
    """Return the threads of lookaheads, without those of kernels, which stay for the next run."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("skirl-") and not name.startswith("skirl-kernel")]


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
