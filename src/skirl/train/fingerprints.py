"""Traces of runs for a comparison bit by bit, and the comparison."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from skirl.core.batch import Batch
from skirl.core.tables import MAX_ROWS, ROW_BITS, Schema
from skirl.train.done import Done
from skirl.train.schedule import Rates
from skirl.train.touched import keys_of
from skirl.train.train import steps

ReadRows = Callable[[np.ndarray], np.ndarray]
"""Returns the records of distinct, ascending keys."""


@dataclass
class Trace:
    """A record of one run, to compare."""

    name: str
    losses: list[float] = field(default_factory=list)
    dense: list[dict[str, bytes]] = field(default_factory=list)
    """A digest of every dense parameter after each step."""
    before: list[np.ndarray] = field(default_factory=list)
    """For each step, the fingerprints of its rows before it, by ascending key."""
    after: list[np.ndarray] = field(default_factory=list)
    """For each step, the fingerprints of its rows after it, by ascending key."""
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """All keys that have a row at the end, ascending."""
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    """The records of these keys."""
    cache: int = 0
    dense_size: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)

    def record(
        self,
        schema: Schema,
        model: nn.Module,
        dense: torch.optim.Optimizer,
        rates: Rates,
        batches: Iterable[Batch],
        read: ReadRows,
        shards: int = 1,
        train: Callable[..., Iterator[Done]] = steps,
    ) -> Iterator[int]:
        """Train and record everything. Yield the number of steps done. train: a function with the arguments of `steps`."""

        def watched() -> Iterator[Batch]:
            step: list[Batch] = []
            for batch in batches:
                step.append(batch)
                if len(step) == shards:  # rows change after its last shard
                    self.before.append(fingerprints(read(rows_of(step, schema))))
                    step = []
                yield batch

        weights = [w for w in model.parameters() if w.numel()]  # embeddings have an empty one
        self.dense_size = {"parameters": len(weights), "numbers": sum(w.numel() for w in weights)}
        for done in train(model, dense, watched(), rates, shards):
            self.losses.append(done.loss)
            self.dense.append({name: digest(value) for name, value in model.named_parameters() if value.numel()})
            self.after.append(fingerprints(read(rows_of(done.batches, schema))))
            yield len(self.losses)


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ."""

    between: tuple[str, str]
    step: int
    """Counted from 1."""
    what: str
    table: str | None = None
    row: int | None = None

    def __str__(self) -> str:
        where = "" if self.table is None else f", row {self.row} of table {self.table!r}"
        return f"{' and '.join(self.between)} differ first in step {self.step}{where}: {self.what}"


def compare(one: Trace, other: Trace, schema: Schema, steps: Iterable[Sequence[Batch]]) -> Difference | None:
    """Return the first difference between two runs over the batches of these steps, or None if all bits are equal."""
    names = (one.name, other.name)

    def row(key: int, step: int, what: str) -> Difference:
        return Difference(names, step, what, schema.tables[key >> ROW_BITS].name, key & (MAX_ROWS - 1))

    trained: dict[int, int] = {}
    for step, batches in enumerate(steps, start=1):
        i, keys = step - 1, rows_of(batches, schema)
        stale = np.flatnonzero(one.before[i] != other.before[i])
        wrong = np.flatnonzero(one.after[i] != other.after[i])
        losses = f"the losses are {one.losses[i]!r} and {other.losses[i]!r}"
        if stale.size:
            key = int(keys[stale[0]])
            since = f"it was trained last in step {trained[key]}" if key in trained else "this is its first use"
            return row(key, step, f"{stale.size} of its {keys.size} rows differ before it; of this one {since}")
        if _bits(one.losses[i]) != _bits(other.losses[i]):
            if wrong.size:
                return row(int(keys[wrong[0]]), step, f"{losses}, all rows were equal before it")
            return Difference(names, step, losses)
        if wrong.size:
            return row(int(keys[wrong[0]]), step, f"{wrong.size} of its {keys.size} rows differ after it, none before")
        for name, digest in one.dense[i].items():
            if digest != other.dense[i][name]:
                return Difference(names, step, f"dense parameter {name} differs after it")
        trained.update(dict.fromkeys(keys.tolist(), step))
    only = np.setxor1d(one.keys, other.keys)
    if only.size:
        holder = one if np.isin(only[0], one.keys) else other
        return row(int(only[0]), trained.get(int(only[0]), 0), f"only {holder.name} has it at the end")
    lost = np.flatnonzero((one.rows.view(np.uint32) != other.rows.view(np.uint32)).any(axis=1))
    if lost.size:
        return row(
            int(one.keys[lost[0]]), trained[int(one.keys[lost[0]])], "equal after it, but not at the end of the run"
        )
    return None


def fingerprints(rows: np.ndarray) -> np.ndarray:
    """Return 64 bits per row: a sum over its words, each times an odd number for its place, so one wrong bit always shows.

    >>> a = np.ones((2, 3), np.float32)
    >>> b = a.copy()
    >>> b[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    >>> (fingerprints(a) == fingerprints(b)).tolist()
    [True, False]
    """
    words = np.ascontiguousarray(rows).view(np.uint32)
    odd = np.random.default_rng(0).integers(0, 1 << 63, words.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    return (words * odd).sum(axis=1, dtype=np.uint64)


def digest(weights: Tensor | bytes) -> bytes:
    """Return a digest of 16 bytes."""
    of = weights if isinstance(weights, bytes) else weights.detach().cpu().numpy().tobytes()
    return hashlib.blake2b(of, digest_size=16).digest()


def _bits(loss: float) -> bytes:
    return np.float64(loss).tobytes()


def rows_of(batches: Sequence[Batch], schema: Schema) -> np.ndarray:
    """Return the distinct keys of some batches, ascending."""
    return np.unique(np.concatenate([keys_of(batch.sparse, schema) for batch in batches]))
