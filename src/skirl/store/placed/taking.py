"""The work of a placed store for all sites together: parallel calls, and splitting and joining frozen rows."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skirl.core.placement import AtSite, AtSites, Placement
from skirl.store import cut
from skirl.store.base import MEMORY_ROWS, Facts, Frozen, Layout
from skirl.store.frozen import FrozenPart, Mine
from skirl.store.frozen_keys import frozen_keys

T = TypeVar("T")


def at_once(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls in parallel, the last one in this thread, and return their results. All have ended, even if one fails.

    >>> with ThreadPoolExecutor(2) as pool:
    ...     at_once(pool, [partial(pow, 2, n) for n in range(4)])
    [1, 2, 4, 8]
    """
    futures: list[Future[T]] = []
    try:
        futures += [pool.submit(call) for call in calls[:-1]]
        last = [call() for call in calls[-1:]]
    finally:
        _ended(futures)
    return [*(future.result() for future in futures), *last]


def all_or_none(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that wait for each other in parallel. Raise the first error that is not just about another call's."""
    futures = [pool.submit(call) for call in calls]
    _ended(futures)
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])


def _ended(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have ended, even after a Ctrl-C, so that none goes on unnoticed."""
    try:
        wait(futures)
    except BaseException:
        wait(futures)
        raise


def by_site(placement: Placement, parts: Sequence[FrozenPart]) -> tuple[list[list[FrozenPart]], list[Facts]]:
    """Return what each site takes of frozen rows, and the facts of those that were placed differently.

    Where rows were placed the same way, a site has files of its own. It looks through all others.
    """
    taken: list[list[FrozenPart]] = [[] for _ in range(placement.sites)]
    moved: list[Facts] = []
    for part in parts:
        own = cut.own_parts(part.facts, placement.digest)
        if own is None:
            moved.append(part.facts)
        for site, over in enumerate(_split(placement, part)):
            mine = part.mine if own is not None else _mine(AtSite(placement, site), part)
            taken[site].append(FrozenPart(part.facts if own is None else own[site], over, mine))
    return taken, moved


def _split(placement: Placement, part: FrozenPart) -> list[list[tuple[NDArray[np.int64], Any]]]:
    """Split by site the rows that replace a part's frozen ones."""
    over: list[list[tuple[NDArray[np.int64], Any]]] = [[] for _ in range(placement.sites)]
    for keys, rows in part.own(part.over):
        sites = placement.site_of(keys)
        for site in np.unique(sites):
            over[site].append((keys[sites == site], rows[sites == site]))
    return over


def _mine(here: AtSite, part: FrozenPart) -> Mine | None:
    """Return the function that picks a site's keys from a part placed differently, or None if all keys are the site's."""
    if part.mine is None:
        return here if here.placement.sites > 1 else None
    if isinstance(part.mine, AtSite | AtSites):
        return AtSites((*(part.mine.each if isinstance(part.mine, AtSites) else (part.mine,)), here))
    return partial(_both, part.mine, here)


def _both(one: Mine, other: Mine, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    return one(keys) & other(keys)


def bytes_of(facts: Facts, layout: Layout) -> int:
    """Return the bytes of frozen rows."""
    if facts.get("kind") == MEMORY_ROWS:
        return sum(entry["bytes"] for entry in facts["files"])
    kinds = zip(facts.get("rows", ()), layout.kinds)
    return sum(count * record.nbytes for count, record in kinds)


def leaving(placement: Placement, facts: Facts, folder: Path, layout: Layout) -> int:
    """Count the bytes of frozen rows that were at another site, by their keys. All count if they were at no site.

    A row that is in the files twice counts twice.
    """
    parts = cut.own_parts(facts, facts["nodes"]["placement"]) if "nodes" in facts else None
    if parts is None:
        return bytes_of(facts, layout)
    moved = 0
    for site, part in enumerate(parts):
        for record, keys in frozen_keys(folder, part):
            moved += record.nbytes * int(np.count_nonzero(placement.site_of(keys) != site))
    return moved


class FrozenSites(Frozen):
    """The rows of all sites at one moment."""

    def __init__(self, pool: ThreadPoolExecutor, placement: str, parts: Sequence[Frozen]) -> None:
        self._pool, self._placement, self._parts = pool, placement, parts

    def write(self) -> Facts:
        """Write all of them in parallel."""
        return cut.joined(at_once(self._pool, [part.write for part in self._parts]), self._placement)

    def release(self) -> None:
        """Release each, even if another fails."""
        failed: list[BaseException] = []
        for part in self._parts:
            try:
                part.release()
            except BaseException as error:
                failed.append(error)
        if failed:
            raise failed[0]
