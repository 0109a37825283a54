"""Stores: they hold the rows that are not on the device."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from skirl.tools.lazily import lazily

if TYPE_CHECKING:
    from skirl.core.placement import PlacementPlan, Site
    from skirl.core.tables import Table
    from skirl.store.base import Layout, Record, Store
    from skirl.store.checkpoint_rows import CheckpointRows
    from skirl.store.disk.store import DiskError, DiskFull, DiskStore
    from skirl.store.memory.store import MemoryStore

__all__ = [
    "CheckpointRows",
    "DiskError",
    "DiskFull",
    "DiskStore",
    "Layout",
    "MemoryStore",
    "Record",
    "Store",
    "open_store",
]


__getattr__ = lazily(
    __name__,
    {
        "base": ("Layout", "Record", "Store"),
        "checkpoint_rows": ("CheckpointRows",),
        "disk.store": ("DiskError", "DiskFull", "DiskStore"),
        "memory.store": ("MemoryStore",),
    },
)


def open_store(
    spec: "str | Store", layout: "Layout | Mapping[int, Record]", *, rows: Mapping[int, int] | None = None
) -> "Store":
    """Return the store that a user's `store=` names.

    **Arguments**

    - `spec`: "memory", "disk:FOLDER", "rpc://HOST:PORT" (memory nodes that meet there), "placed:PLAN.json" (several of
      these, by a plan), "checkpoint" (the rows that `skirl.load` finds,
      read-only), or a `Store`, which is checked and used.
    - `layout`: the records of each table.
    - `rows`: number of rows of each table, which halves the memory of a disk store's index. None: not known.

    >>> from skirl.store import Record
    >>> len(open_store("memory", {0: Record(65)}))
    0
    """
    from skirl.store.base import Layout, Store

    if isinstance(spec, Store):
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        if spec.layout != layout:
            raise ValueError(f"the store given has {spec.layout}, the tables need {layout}: open it with the latter")
        return spec
    if not known(spec):
        raise ValueError(
            f"store {spec!r} is not known, set it to 'memory', 'disk:FOLDER', 'rpc://HOST:PORT', 'placed:PLAN.json', "
            "'checkpoint' or pass a skirl.store.Store"
        )
    if spec == "memory":
        from skirl.store.memory.store import MemoryStore

        return MemoryStore(layout)
    if spec == "checkpoint":
        from skirl.store.checkpoint_rows import CheckpointRows

        return CheckpointRows(layout, rows=rows)
    if spec.startswith("disk:"):
        from skirl.store.disk.store import DiskStore

        return DiskStore(spec.removeprefix("disk:"), layout, rows=rows)
    if spec.startswith("rpc:"):
        from skirl.store.remote.store import RemoteStore

        return RemoteStore(spec, layout, rows=rows)
    return _placed(spec, layout, rows)


def known(spec: str) -> bool:
    """Return whether a spec names a store that can be opened. Raise if its address is wrong.

    >>> known("disk:rows"), known("disk:"), known("foo:rows")
    (True, False, False)
    """
    if spec.startswith("rpc:"):
        from skirl.store.remote.wire import Address

        Address.parse(spec)
    return spec in ("memory", "checkpoint") or re.match("(disk|rpc|placed):.", spec) is not None


def check_sites(sites: "Iterable[Site]") -> None:
    """Raise if the store of a site is not known."""
    for site in sites:
        try:
            there = known(site.store)
        except ValueError as error:
            raise ValueError(f"site {site.name!r}: {error}") from None
        if not there:
            raise ValueError(
                f"site {site.name!r} has store {site.store!r}: set it to memory, disk:FOLDER or rpc://HOST:PORT"
            )


def plan_of(spec: str) -> "tuple[PlacementPlan, str | None]":
    """Return the plan that "placed:PLAN.json" names, and the folder inside each store's own if the spec ends in one."""
    from skirl.core.placement import PlacementPlan

    named = re.fullmatch(r"placed:(.+?\.json)(?:/(.+))?", spec)
    if named is None:
        raise ValueError(f"store is {spec!r}: write it placed:PLAN.json, a plan of where rows live")
    plan = PlacementPlan.load(named[1])
    try:
        check_sites(plan.sites)
    except ValueError as error:
        raise ValueError(f"{named[1]}: {error}") from None
    return plan, named[2]


def check_plan(store: Any, tables: "Sequence[Table]", records: "Mapping[int, Record]") -> None:
    """Raise if a store is a plan's and the plan is for other tables, or for smaller rows. Nothing is opened."""
    if not isinstance(store, str) or not store.startswith("placed:"):
        return
    plan, _ = plan_of(store)
    try:
        plan.check([(t.name, t.rows, t.dim) for t in tables], [records[n].nbytes for n in range(len(tables))])
    except ValueError as error:
        raise ValueError(f"store is {store!r}: {error}") from None


def _placed(spec: str, layout: "Layout | Mapping[int, Record]", rows: Mapping[int, int] | None) -> "Store":
    """Open the stores of a plan as one store. A plan that is refused creates no folder."""
    from skirl.store.base import Layout
    from skirl.store.own_folder import inside
    from skirl.store.placed.store import PlacedStore
    from skirl.store.placed.taking import check_folders, check_layout

    plan, folder = plan_of(spec)
    layout = layout if isinstance(layout, Layout) else Layout(layout)
    check_layout(plan, layout, rows)
    specs = [inside(site.store, folder) for site in plan.sites]
    check_folders(plan, specs)
    with ExitStack() as opened:
        stores = [opened.enter_context(open_store(spec, layout, rows=rows)) for spec in specs]
        store = PlacedStore(plan, stores, layout, rows=rows)
        opened.pop_all()
        return store
