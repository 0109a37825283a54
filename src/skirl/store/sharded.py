"""Several stores as one: each row is in one of them, by a hash of its key and their weights."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skirl.core.placement import Placement, Shard
from skirl.store.base import Facts, Frozen, FrozenPart, Layout, Record, Rows, SavedRows, Store
from skirl.store.disk.frozen import manifest_of

log = logging.getLogger("skirl")

MARK = "~placement"
"""Entry of a store's `about` that says of which list the store is, and which of its stores."""
_MOVING = "rows are being moved"
_OTHERS = (
    "does not have the rows that this list of stores, with these weights, put there: see whether its disk is mounted, load "
    "a checkpoint, or use the list that they were written by"
)
_CALLS = 3
"""Number of calls of the store that are served at once: different threads read, write back and look up rows."""


class ShardedStore(Store):
    """The store behind a list of stores, such as `store="disk:a,disk:b*2"`."""

    def __init__(self, stores: Sequence[Store], weights: Sequence[int], layout: Layout | Mapping[int, Record]) -> None:
        super().__init__(layout)
        self.stores = tuple(stores)
        self.placement = Placement(tuple(weights), "sites")
        self.durable = any(store.durable for store in self.stores)
        self._pool = ThreadPoolExecutor(_CALLS * len(self.stores), thread_name_prefix="skirl-shard")
        self._take_point()
        self._read_about()
        self._misplaced = self._find_misplaced()

    def __repr__(self) -> str:
        return ",".join(map(repr, self.stores))

    def _take_point(self) -> None:
        self.identity = self.stores[0].identity
        self.generation = max(store.generation for store in self.stores)

    # Stores that outlive this process remember which rows they have.

    def _mark(self, number: int) -> str:
        return f"{self.placement.digest} site {number}"

    def _read_about(self) -> None:
        """Set `about` from the first store on disk that has rows, else the first on disk, else the first of all."""
        on_disk = [store for store in self.stores if store.durable] or self.stores[:1]
        keeps = min(on_disk, key=lambda store: not len(store))
        self.about = {name: of for name, of in keeps.about.items() if name != MARK}

    def _find_misplaced(self) -> str | None:
        """Return why rows would not be found, if a store has another list's rows or has lost its own; else None."""
        if any(map(len, self.stores)):
            for number, store in enumerate(self.stores):
                if store.about.get(MARK) != self._mark(number) and (len(store) or self.durable):
                    return f"{store!r} {_OTHERS}"
        return None

    def _check_placed(self) -> None:
        if self._misplaced is not None:
            raise ValueError(self._misplaced)

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        if about is not None:
            self._check_open()
            if self._misplaced is None:
                new = [{**about, MARK: self._mark(number)} for number in range(len(self.stores))]
                all_at_once(self._pool, [partial(store.describe, of) for store, of in zip(self.stores, new)])
                self._read_about()
            else:  # this list would not find these rows, so they do not get its mark
                all_at_once(self._pool, [store.flush for store in self.stores])
            self._take_point()
        return sum(map(len, self.stores))

    # Rows

    def _by_store(self, keys: NDArray[np.int64]) -> list[tuple[Store, NDArray[np.int64]]]:
        """Return each store that has some of these rows, and their indices."""
        self._check_placed()
        sites = self.placement.site_of(keys)
        order = np.argsort(sites.astype(np.uint16), kind="stable")  # of 16 bits: sorted by radix, without comparisons
        pieces = np.split(order, np.cumsum(np.bincount(sites, minlength=len(self.stores)))[:-1])
        return [(store, at) for store, at in zip(self.stores, pieces) if at.size]

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        def read(store: Store, at: NDArray[np.int64]) -> None:
            rows: Any = np.empty((len(at), out.shape[1]), out.dtype)
            held = np.zeros(len(at), np.bool_)
            store._read(kind, keys[at], rows, held)
            out[at[held]], found[at] = rows[held], held

        all_at_once(self._pool, [partial(read, *each) for each in self._by_store(keys)])

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        pieces = self._by_store(keys)
        all_at_once(self._pool, [partial(store._write, kind, keys[at], rows[at]) for store, at in pieces])

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        for store in self.stores:
            yield from store.held()

    # Points

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        self._check_open()
        self._check_placed()
        parts = None if since is None else own_parts(since, self.placement.digest)
        writes = []
        with ExitStack() as frozen:
            for number, store in enumerate(self.stores):
                one = store.freeze(folder, None if parts is None else parts[number])
                frozen.callback(one.release)
                writes.append(one.write)
            self._take_point()
            release = frozen.pop_all().close
        return Frozen(lambda: joined(all_at_once(self._pool, writes), self.placement.digest), release)

    def thaw(self, saved: SavedRows) -> None:
        """If a store fails or the process ends meanwhile, calls are refused until a load succeeds."""
        self._check_open()
        for part in saved.parts:
            manifest_of(saved.folder, part.facts, self.layout)
        taken = self._divided(saved.parts)
        self._misplaced = f"{self!r} {_OTHERS}"
        for store in self.stores:
            store.describe(store.about | {MARK: _MOVING})
        each = zip(self.stores, taken, strict=True)
        all_at_once(self._pool, [partial(store.thaw, replace(saved, parts=parts)) for store, parts in each])
        for number, store in enumerate(self.stores):
            store.describe(self.about | store.about | {MARK: self._mark(number)})
        self._misplaced = None
        self._take_point()
        self._read_about()

    def _divided(self, parts: Sequence[FrozenPart]) -> list[list[FrozenPart]]:
        owns = [own_parts(part.facts, self.placement.digest) for part in parts]
        if any(own is None and "resident" not in part.facts for own, part in zip(owns, parts, strict=True)):
            log.warning("rows move: each of %d stores looks through all that were saved", len(self.stores))

        def of(site: int, part: FrozenPart, own: list[Facts] | None) -> FrozenPart:
            if own is not None:
                return FrozenPart(own[site], part.shard)
            return FrozenPart(part.facts, (part.shard or Shard(())).within(self.placement, site))

        return [[of(site, *each) for each in zip(parts, owns, strict=True)] for site in range(len(self.stores))]

    def close(self, *, flush: bool = True) -> None:
        if not self.closed:
            super().close()
            self._pool.shutdown()
            with ExitStack() as closing:
                for store in self.stores:
                    closing.callback(store.close, flush=flush)


T = TypeVar("T")


def all_at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls in parallel, and return their results. All have ended, even if one fails."""
    futures: list[Future[T]] = []
    try:
        for call in calls:
            futures.append(pool.submit(call))
    finally:
        wait(futures)
    return [future.result() for future in futures]


def joined(parts: Sequence[Facts], placement: str) -> Facts:
    """Join the facts of several stores' frozen rows into facts of one store, which any store can take."""
    own = ("identity", "generation", "segments", "nodes")
    points = [{name: part[name] for name in own if name in part} for part in parts]
    return parts[0] | {
        "generation": max(part["generation"] for part in parts),
        "segments": [each for part in parts for each in part["segments"]],
        "nodes": {"placement": placement, "points": [p | {"segments": len(p["segments"])} for p in points]},
    }


def own_parts(facts: Facts, placement: str) -> list[Facts] | None:
    """Return the parts that `joined` put together, or None if rows were split among the stores differently then."""
    if "nodes" not in facts or facts["nodes"]["placement"] != placement:
        return None
    found, start, common = [], 0, {name: value for name, value in facts.items() if name != "nodes"}
    for point in facts["nodes"]["points"]:
        end = start + point["segments"]
        found.append(common | point | {"segments": facts["segments"][start:end]})
        start = end
    return found
