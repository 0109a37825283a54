"""How a placed store takes over rows that other sites held."""

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from skirl.core.placement import AtSite, AtSites, Placement, PlacementPlan
from skirl.store import cut
from skirl.store.base import MEMORY_ROWS, Facts, Frozen, FrozenPart, Layout, Mine
from skirl.store.disk.frozen import rows_of
from skirl.store.disk.manifest import NAME, Manifest
from skirl.store.disk.os_files import OsFiles, Unusable
from skirl.store.disk.store import DiskStore
from skirl.store.frozen_keys import frozen_keys
from skirl.store.memory.frozen import frozen_rows

MARK = "~placement"
"""Entry of a site's `about` that says to which placement its rows belong, and which site it is."""


def mark_of(placement: str, site: int) -> str:
    """Return what a site's `about` has under `MARK`."""
    return f"{placement} site {site}"


def check_layout(plan: PlacementPlan, layout: Layout, rows: Mapping[int, int] | None) -> None:
    """Raise if a plan is for other tables than a store's."""
    tables, records = plan.tables, layout.records
    if max(records) + 1 != len(tables):
        raise ValueError(
            f"the plan has {len(tables)} tables, the model {max(records) + 1}: make the plan for this model"
        )
    for number, table in enumerate(tables):
        if number not in records:
            continue
        if rows is not None and rows[number] != table.rows:
            raise ValueError(
                f"table {table.name!r} has {table.rows:,} rows in the plan and {rows[number]:,} in the model: make "
                "the plan for this model"
            )
        if records[number].width < table.dim:
            raise ValueError(
                f"table {table.name!r} has dim {table.dim} in the plan, and records of {records[number].width} "
                "numbers in the model: make the plan for this model"
            )


def check_folders(plan: PlacementPlan, stores: Sequence[str]) -> None:
    """Raise if a site has no folder although another one has rows that this plan placed."""
    digest = plan.placement.digest
    folders = [Path(disk) if disk else None for _, _, disk in (s.partition("disk:") for s in stores)]
    kept = next((n for n, at in enumerate(folders) if at is not None and _has_rows(at, mark_of(digest, n))), None)
    gone = next((n for n, at in enumerate(folders) if at is not None and not at.exists()), None)
    if kept is not None and gone is not None:
        raise ValueError(
            f"site {plan.sites[gone].name!r} has no folder {folders[gone]}, and site {plan.sites[kept].name!r} has rows of "
            "the same plan: see whether its disk is mounted; if its rows are lost, make the folder and load a checkpoint"
        )


def _has_rows(folder: Path, mark: str) -> bool:
    try:
        manifest = Manifest.read(folder / NAME)
    except (OSError, Unusable):
        return False  # opening it says what is wrong
    return manifest.about.get(MARK) == mark and any(manifest.rows)


class AsSegments(Frozen):
    """The frozen rows of a site in memory, written as those of a disk store. All rows are written, and twice."""

    def __init__(self, frozen: Frozen, folder: Path, layout: Layout) -> None:
        self._frozen, self._folder, self._layout = frozen, folder, layout

    def write(self) -> Facts:
        """Write them as segments."""
        facts, made = self._frozen.write(), self._folder.parent / f"site-{secrets.token_hex(8)}"
        try:
            with DiskStore(made, self._layout) as store:
                for keys, rows in frozen_rows(self._folder, facts, self._layout):
                    whole: Any = np.ascontiguousarray(rows)
                    store.write(np.ascontiguousarray(keys), whole)
                segments = store.freeze(self._folder, None)
                try:
                    written = segments.write()
                finally:
                    segments.release()
        finally:
            shutil.rmtree(made, ignore_errors=True)
            for entry in facts["files"]:
                (self._folder / entry["file"]).unlink(missing_ok=True)
        return written | {"identity": facts["identity"], "generation": facts["generation"]}

    def release(self) -> None:
        """See `Frozen.release`."""
        self._frozen.release()


def in_memory(part: FrozenPart, folder: Path, layout: Layout) -> FrozenPart:
    """Return a part that a site in memory can take, whichever kind of store froze it. Rows on disk are read when needed."""
    if part.facts.get("kind") == MEMORY_ROWS:
        return part
    named = {name: part.facts[name] for name in ("identity", "generation")}
    return FrozenPart(
        {"kind": MEMORY_ROWS, **named, "layout": layout.facts(), "files": []}, _read(part, folder, layout)
    )


def _read(part: FrozenPart, folder: Path, layout: Layout) -> Iterator[tuple[NDArray[np.int64], Any]]:
    yield from rows_of(OsFiles(), part, layout, folder)
    yield from part.own(part.over)


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
