"""Random batches of ids, a loader that yields them at any speed, and a slow store."""

import copy
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from skirl import KeyedJagged, Table
from skirl.core.reference import Bags
from skirl.core.tables import Schema
from skirl.engine.access import peek
from skirl.engine.engine import Engine
from skirl.store import MemoryStore, Record


def jagged(
    rng: np.random.Generator,
    rows: Mapping[str, int],
    samples: int,
    least: int = 0,
    most: int = 3,
    one: Sequence[str] = (),
) -> KeyedJagged:
    """Return `least` to `most` ids below its rows for each feature and sample, and exactly one for features in `one`."""
    lengths = rng.integers(least, most + 1, (len(rows), samples))
    lengths[[name in one for name in rows]] = 1
    ids = rng.integers(0, np.repeat([*rows.values()], lengths.sum(1)))
    return KeyedJagged(list(rows), torch.from_numpy(ids), lengths=torch.from_numpy(lengths.reshape(-1)))


@dataclass
class Item:
    number: int
    sparse: Any
    targets: torch.Tensor


class Stream:
    """Batches drawn from a seed; ids crowd into a small range of every table, so that rows come back."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        seed: int,
        universe: int = 20,
        sizes: tuple[int, int] = (1, 4),
        longest: int = 3,
        weights: float = 0.0,
        wide: bool = True,
        unpooled: bool = False,
        shared: float = 0.0,
        make: Any = KeyedJagged,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._tables = tables
        self._sizes, self._longest, self._weights = sizes, longest, weights
        self._dtype = torch.int64 if wide else torch.int32
        self._unpooled, self._shared = unpooled, shared
        self._make = make
        self.bags: dict[int, dict[str, Bags]] = {}
        """The ids of every batch drawn, in the reference's format."""
        self._ids = []
        for table in tables:
            some = self._rng.integers(0, table.rows, universe)
            some[:2] = 0, table.rows - 1
            self._ids.append(np.unique(some))

    def draw(self, number: int) -> Item:
        """Draw one batch: its size, bags, weights and order of features."""
        rng = self._rng
        batch = int(rng.integers(self._sizes[0], self._sizes[1] + 1))
        weighted = rng.random() < self._weights
        names = [(name, t) for t, table in enumerate(self._tables) for name in table.features]
        bags = self.bags[number] = {}
        parts, lengths, scales = {}, {}, {}
        inverse = self._inverse(batch, [name for name, _ in names])
        by_name = {name: of for group, of in inverse.items() for name in group}
        for name, t in names:
            own = by_name.get(name)
            sizes = rng.integers(0, self._longest + 1, batch if own is None else max(own, default=-1) + 1)
            count = int(sizes.sum())
            # Half of the ids are hot: they come from a quarter of the range.
            hot = rng.random(count) < 0.5
            pool = len(self._ids[t])
            ids = self._ids[t][np.where(hot, rng.integers(0, max(1, pool // 4), count), rng.integers(0, pool, count))]
            scale = torch.from_numpy(rng.normal(size=count).astype(np.float32))
            offsets = np.concatenate([[0], np.cumsum(sizes)])
            if self._unpooled:
                bags[name] = (ids.tolist(), list(range(count + 1)), None)
            else:
                bags[name] = (ids.tolist(), offsets.tolist(), scale.tolist() if weighted else None)
            if own is not None:
                of_ids = [i for bag in own for i in range(offsets[bag], offsets[bag + 1])]
                bags[name] = (*bags[name][:3], of_ids if self._unpooled else own)
            parts[name], lengths[name], scales[name] = torch.from_numpy(ids).to(self._dtype), sizes, scale
        order = [name for name, _ in names]
        rng.shuffle(order)
        if rng.random() < 0.3:  # a feature that no table uses
            order.insert(int(rng.integers(0, len(order) + 1)), "stranger")
            parts["stranger"], lengths["stranger"] = torch.full((batch,), 10**9, dtype=self._dtype), np.ones(batch, int)
            scales["stranger"] = torch.ones(batch)
        sizes = torch.from_numpy(np.concatenate([lengths[name] for name in order])).long()
        splits: dict[str, Any] = {"lengths": sizes}
        if rng.random() < 0.5:
            splits = {"offsets": torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])}
        weights = torch.cat([scales[name] for name in order]) if weighted else None
        if inverse:
            splits["strides"] = [len(lengths[name]) for name in order]
            splits["inverse"] = {group: torch.tensor(of, dtype=torch.int64) for group, of in inverse.items()}
        sparse = self._make(keys=order, values=torch.cat([parts[n] for n in order]), weights=weights, **splits)
        targets = torch.from_numpy(rng.choice([-1.0, 1.0], batch))
        return Item(number, sparse, targets)

    def _inverse(self, batch: int, names: list[str]) -> dict[tuple[str, ...], list[int]]:
        """Draw the bag of each sample, by groups of features that change together, for some batches and some features."""
        rng = self._rng
        if not (self._shared and batch and rng.random() < self._shared):
            return {}
        group = tuple(name for name in names if rng.random() < 0.5)
        groups = [group, *((name,) for name in names if name not in group and rng.random() < 0.5)]
        drawn = {group: rng.integers(0, rng.integers(1, batch + 1), batch) for group in groups if group}
        return {group: np.unique(of, return_inverse=True)[1].tolist() for group, of in drawn.items()}


class Naps:
    """Sleeps of random length, up to `longest` seconds, in one call of three."""

    def __init__(self, longest: float, seed: int) -> None:
        self._longest = longest
        self._random = random.Random(seed)

    def __call__(self, *_: object) -> None:
        if self._longest and self._random.random() < 0.33:
            time.sleep(self._random.random() * self._longest)


class Loader:
    """Yields items slowly, and reuses its buffers unless told to yield fresh ones: an item is overwritten by the next."""

    def __init__(self, items: Sequence[Item], nap: Naps, *, fresh: bool) -> None:
        self._items = items
        self._nap = nap
        self.yields_fresh = fresh

    def __iter__(self) -> Iterator[Item]:
        for item in self._items:
            self._nap()
            if self.yields_fresh:
                yield item
                continue
            reused = copy.deepcopy(item)
            yield reused
            reused.sparse.values().fill_(-1)


class SlowStore(MemoryStore):
    """A store that sleeps before it writes, so that a row read too early is found stale."""

    def __init__(
        self, tables: Sequence[Table], rules: Sequence[Any], dtype: torch.dtype, nap: Naps, slow_write: float
    ) -> None:
        schema = Schema.of(tables)
        name = str(dtype).removeprefix("torch.")
        super().__init__({i: Record(rules[i].width(t.dim), name) for i, t in enumerate(schema.tables)})
        self._nap = nap
        self._slow_write = slow_write

    def _read(self, kind: int, keys: Any, out: Any, found: Any) -> None:
        self._nap()
        super()._read(kind, keys, out, found)

    def _write(self, kind: int, keys: Any, rows: Any) -> None:
        self._nap()
        time.sleep(self._slow_write)
        super()._write(kind, keys, rows)


def used_rows(engine: Engine) -> dict[int, bytes]:
    """Return all rows of small tables that were used, with their state, by key, wherever they are."""
    found = {}
    for bank, members in enumerate(engine.schema.banks):
        keys = np.concatenate([np.arange(engine.schema.tables[t].rows) | (t << 48) for t in members.tables])
        keys = keys[engine.seen.has(keys)]
        found |= {key: row.tobytes() for key, row in zip(keys.tolist(), peek(engine, keys, bank), strict=True)}
    return found


def stored_rows(engine: Engine) -> dict[int, np.ndarray]:
    """Return all rows of a flushed store, by key."""
    rows = {}
    held = engine.store.held()
    for keys in held:
        table = int(keys[0]) >> 48
        bank = next(i for i, b in enumerate(engine.schema.banks) if table in b.tables)
        out = np.empty((len(keys), engine.packs[0].widths[bank]), engine.dtype)
        assert engine.store.read(keys, out).all()
        rows.update(zip(keys.tolist(), out, strict=True))
    return rows
