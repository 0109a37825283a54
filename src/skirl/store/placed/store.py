"""Several stores as one: a plan says which of them has each row, and a call goes to all of them at once."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.core.placement import PlacementPlan
from skirl.store import cut
from skirl.store.base import DISK_ROWS, MEMORY_ROWS, Facts, Frozen, FrozenPart, Layout, Record, Rows, Store, at_once
from skirl.store.disk.frozen import point_of
from skirl.store.placed import taking
from skirl.store.placed.taking import MARK, check_layout, mark_of
from skirl.tools.units import size

log = logging.getLogger("skirl")

_MOVING = "rows are being moved"
_HALF = "a load ended before all sites had their rows: load a checkpoint"
_CALLS = 3
"""Number of calls of the store that are served at once: different threads read, write back and look up rows."""


@dataclass
class SiteCounts:
    """The rows, bytes and calls of one site."""

    reads: int = 0
    """Number of rows read."""
    writes: int = 0
    """Number of rows written."""
    bytes_read: int = 0
    bytes_written: int = 0
    calls: int = 0


class PlacedStore(Store):
    """The store behind `store="placed:PLAN.json"`."""

    def __init__(
        self,
        plan: PlacementPlan,
        stores: Sequence[Store],
        layout: Layout | Mapping[int, Record],
        *,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(layout)
        self.plan, self.stores = plan, tuple(stores)
        self.placement = plan.placement
        if len(self.stores) != len(self.plan.sites):
            raise ValueError(
                f"{len(self.stores)} stores for {len(self.plan.sites)} sites of the plan: open one for each"
            )
        check_layout(plan, self.layout, rows)
        kinds = {store.frozen_kind for store in self.stores}
        self.mixed = len(kinds) > 1
        """True if some sites are in memory and others on disk."""
        self.frozen_kind = DISK_ROWS if self.mixed else self.stores[0].frozen_kind
        self.counts = [SiteCounts() for _ in self.stores]
        """Counts of each site."""
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(_CALLS * len(self.stores), thread_name_prefix="skirl-site")
        self._take_point()
        self._read_about()
        self._misplaced = self._found_misplaced()

    def __repr__(self) -> str:
        return f"PlacedStore({', '.join(map(repr, self.stores))})"

    def _take_point(self) -> None:
        self.identity = self.stores[0].identity
        self.generation = max(store.generation for store in self.stores)

    # Stores that outlive this process remember which site's rows they have.

    def _mark(self, site: int) -> str:
        return mark_of(self.placement.digest, site)

    def _read_about(self) -> None:
        """Set `about` from the first site on disk that has rows, else the first on disk, else the first of all."""
        on_disk = [store for store in self.stores if store.frozen_kind == DISK_ROWS] or self.stores[:1]
        keeps = min(on_disk, key=lambda store: not len(store))
        self.about = {name: of for name, of in keeps.about.items() if name != MARK}

    def _found_misplaced(self) -> str | None:
        """Return why rows would not be found, if a site has another placement's rows or has lost its own; else None."""
        sites = list(zip(self.plan.sites, self.stores))
        kept = next((site.name for site, store in sites if len(store)), None)
        if kept is None:
            return None
        for number, (site, store) in enumerate(sites):
            if store.about.get(MARK) == self._mark(number):
                continue  # if it has no rows, it never had any
            if store.about.get(MARK) == _MOVING:
                return f"site {site.name!r} ({store!r}): {_HALF}"
            if len(store):
                return (
                    f"site {site.name!r} ({store!r}) has rows that another placement put there: load a checkpoint, which "
                    "moves them, or use the plan that they were placed by"
                )
            if store.frozen_kind == DISK_ROWS:
                return (
                    f"site {site.name!r} ({store!r}) is empty and was never told of the rows at site {kept!r}: see whether "
                    "its disk is mounted and its folder the one that it had, or load a checkpoint"
                )
        if self.mixed:
            gone = next(s.name for s, of in zip(self.plan.sites, self.stores) if of.frozen_kind == MEMORY_ROWS)
            return (
                f"site {kept!r} on disk has the rows of a run whose site {gone!r} was in memory and is gone: load a "
                "checkpoint, or begin with empty folders"
            )
        return None

    def _check_placed(self) -> None:
        if self._misplaced is not None:
            raise ValueError(self._misplaced)

    def remember(self, about: Mapping[str, Any]) -> None:
        """See `Store.remember`. The tables must be those of the plan."""
        self._check_open()
        if about:
            self.plan.check([(name, None, None) for name in about])
        for number, store in enumerate(self.stores):
            store.remember({**about, MARK: self._mark(number)})
        self._read_about()

    # Rows

    def _by_site(self, keys: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Return each site that has some of these rows, and their indices."""
        self._check_placed()
        starts, order = np.zeros(len(self.stores) + 1, np.int64), np.empty(keys.size, np.int64)
        cut.by_site(self.placement.site_of(keys), starts, order)
        ends = starts.tolist()
        return [(s, order[ends[s] : ends[s + 1]]) for s in range(len(self.stores)) if ends[s + 1] > ends[s]]

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        calls = [partial(self._read_at, site, kind, keys, at, out, found) for site, at in self._by_site(keys)]
        taking.at_once(self._pool, calls)

    def _read_at(
        self, site: int, kind: int, keys: NDArray[np.int64], at: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]
    ) -> None:
        if len(at) == len(keys):
            self.stores[site]._read(kind, keys, out, found)
            self._count(site, reads=int(np.count_nonzero(found)), nbytes=out.itemsize * out.shape[1])
            return
        rows: Any = np.empty((len(at), out.shape[1]), out.dtype)
        held = np.zeros(len(at), np.bool_)
        self.stores[site]._read(kind, keys[at], rows, held)
        if not held.all():
            at, rows = at[held], rows[held]
        cut.give(rows, at, out)
        found[at] = True
        self._count(site, reads=len(at), nbytes=out.itemsize * out.shape[1])

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        calls = [partial(self._write_at, site, kind, keys, at, rows) for site, at in self._by_site(keys)]
        taking.at_once(self._pool, calls)

    def _write_at(self, site: int, kind: int, keys: NDArray[np.int64], at: NDArray[np.int64], rows: Rows) -> None:
        if len(at) < len(keys):
            mine: Any = np.empty((len(at), rows.shape[1]), rows.dtype)
            cut.take(rows, at, mine)
            keys, rows = keys[at], mine
        self.stores[site]._write(kind, keys, rows)
        self._count(site, writes=len(keys), nbytes=rows.itemsize * rows.shape[1])

    def _count(self, site: int, *, reads: int = 0, writes: int = 0, nbytes: int) -> None:
        with self._counting:
            counts = self.counts[site]
            counts.calls += 1
            counts.reads += reads
            counts.writes += writes
            counts.bytes_read += reads * nbytes
            counts.bytes_written += writes * nbytes

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    def keys(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        for store in self.stores:
            yield from store.keys()

    def held(self) -> Iterator[NDArray[np.int64] | tuple[int, NDArray[np.uint64]]]:
        """See `Store.held`. The order is site by site."""
        self._check_open()
        for store in self.stores:
            yield from store.held()

    # Points

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """See `Store.freeze`. The facts name the placement. Any store that takes such rows can take all of them."""
        self._check_open()
        self._check_placed()
        parts = None if since is None else cut.own_parts(since, self.placement.digest)
        frozen: list[Frozen] = []
        try:
            for number, store in enumerate(self.stores):
                turned = self.mixed and store.frozen_kind == MEMORY_ROWS
                of_site = store.freeze(folder, None if parts is None or turned else parts[number])
                frozen.append(taking.AsSegments(of_site, folder, self.layout) if turned else of_site)
        except BaseException:
            taking.FrozenSites(self._pool, self.placement.digest, frozen).release()
            raise
        self._take_point()
        return taking.FrozenSites(self._pool, self.placement.digest, frozen)

    def thaw_parts(
        self,
        folder: Path,
        parts: Sequence[FrozenPart],
        identity: str,
        generation: int,
        ready: Callable[[], Any] = at_once,
    ) -> None:
        """See `Store.thaw_parts`. If rows were placed the same way, each site takes its own; else each looks through all.

        If a site fails or the process ends once the first site has changed, calls are refused until a load succeeds.
        """
        self._check_open()
        for part in parts:
            point_of(folder, part.facts, self.layout)
        taken, moved = taking.by_site(self.placement, parts)
        if self.mixed:
            for number, store in enumerate(self.stores):
                if store.frozen_kind == MEMORY_ROWS:
                    taken[number] = [taking.in_memory(part, folder, self.layout) for part in taken[number]]
        moved_bytes = sum(taking.bytes_of(facts, self.layout) for facts in moved)
        told = moved_bytes > 0 and (len(self.stores) > 1 or any("nodes" in facts for facts in moved))
        if told:
            leave = size(sum(taking.leaving(self.placement, facts, folder, self.layout) for facts in moved))
            many = f"{leave} move to another site, and the {len(self.stores)} sites search {size(moved_bytes)} of rows"
            log.warning("rows were placed differently: %s for those that are now theirs", many)
        # Each site reads all its rows and then waits for the others, so if one fails before that, none has changed.
        changing, before = threading.Event(), [dict(store.about) for store in self.stores]

        def all_ready() -> None:
            ready()
            changing.set()

        meeting = threading.Barrier(len(self.stores), action=all_ready)
        done: list[int] = []

        def take(number: int) -> None:
            try:
                self.stores[number].thaw_parts(folder, taken[number], identity, generation, meeting.wait)
            except BaseException:
                meeting.abort()
                raise
            if told:
                done.append(number)
                log.warning("site %s has its rows, %d of %d", self.plan.sites[number].name, len(done), len(self.stores))

        try:
            for store in self.stores:
                self._tell(store, store.about | {MARK: _MOVING})
            taking.all_or_none(self._pool, [partial(take, number) for number in range(len(self.stores))])
            for number, store in enumerate(self.stores):
                self._tell(store, self.about | store.about | {MARK: self._mark(number)})
        except BaseException:
            if changing.is_set():
                self._misplaced = _HALF
            else:
                for store, about in zip(self.stores, before):
                    with suppress(Exception):  # the first error is the one to raise
                        self._tell(store, about)
            raise
        self._misplaced = None
        self._take_point()
        self._read_about()

    def _tell(self, store: Store, about: Mapping[str, Any]) -> None:
        """Have a store remember to which placement its rows belong, or that they are being moved."""
        if store.about.get(MARK) != about.get(MARK):
            store.flush()
            store.remember(about)

    def flush(self) -> None:
        """See `Store.flush`. All sites are flushed."""
        self._check_open()
        taking.at_once(self._pool, [store.flush for store in self.stores])
        self._take_point()

    def close(self) -> None:
        """Close all stores."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Exit each store as if it were alone. A store on disk does not flush after an exception."""
        if self.closed:
            return
        super().close()
        self._pool.shutdown()
        failed: list[BaseException] = []
        for store in self.stores:
            try:
                store.__exit__(kind, error, trace)
            except BaseException as why:
                failed.append(why)
        if failed:
            raise failed[0]
