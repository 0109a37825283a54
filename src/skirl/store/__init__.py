"""Stores: they hold the rows that are not on the device."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from skirl.tools.lazily import lazily

if TYPE_CHECKING:
    from skirl.core.placement_plan import PlacementPlan
    from skirl.store.base import Layout, Record, Store
    from skirl.store.checkpoint_rows import CheckpointRows
    from skirl.store.disk.store import DiskError, DiskFull, DiskStore
    from skirl.store.link import Link, LinkStore
    from skirl.store.memory.store import MemoryStore

__all__ = [
    "CheckpointRows",
    "DiskError",
    "DiskFull",
    "DiskStore",
    "Layout",
    "Link",
    "LinkStore",
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
        "link": ("Link", "LinkStore"),
        "memory.store": ("MemoryStore",),
    },
)


def open_store(
    spec: "str | Store", layout: "Layout | Mapping[int, Record]", *, rows: Mapping[int, int] | None = None
) -> "Store":
    """Return the store that a user's `store=` names.

    **Arguments**

    - `spec`: "memory", "disk:FOLDER", "rpc://HOST:PORT" (memory nodes that meet there), "placed:PLAN.json" (several of
      these, as planned by `skirl place`), "link:RATE,DELAY:STORE", "checkpoint" (the rows that `skirl.load` finds,
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
    if spec == "memory":
        from skirl.store.memory.store import MemoryStore

        return MemoryStore(layout)
    if spec == "checkpoint":
        from skirl.store.checkpoint_rows import CheckpointRows

        return CheckpointRows(layout, rows=rows)
    if spec.startswith("disk:") and spec != "disk:":
        from skirl.store.disk.store import DiskStore

        return DiskStore(spec.removeprefix("disk:"), layout, rows=rows)
    if spec.startswith("rpc:"):
        from skirl.store.remote.store import RemoteStore

        return RemoteStore(spec, layout, rows=rows)
    if spec.startswith("placed:"):
        return _placed(spec, layout, rows)
    if spec.startswith("link:"):
        from skirl.store.link import LinkStore, split_spec

        link, inner = split_spec(spec)
        return LinkStore(open_store(inner, layout, rows=rows), link)
    raise ValueError(
        f"store {spec!r} is not known, set it to 'memory', 'disk:FOLDER', 'rpc://HOST:PORT', 'placed:PLAN.json', "
        "'link:RATE,DELAY:STORE', 'checkpoint' or pass a skirl.store.Store"
    )


def plan_of(spec: str) -> "tuple[PlacementPlan, str | None]":
    """Return the plan that "placed:PLAN.json" names, and the folder inside each store's own if the spec ends in one.

    **Arguments**

    - `spec`: the store, as `store=` names it: "placed:PLAN.json" or "placed:PLAN.json/FOLDER".
    """
    from skirl.core.placement_plan import PlacementPlan

    named = re.fullmatch(r"placed:(.+?\.json)(?:/(.+))?", spec)
    if named is None:
        raise ValueError(f"store is {spec!r}: write it placed:PLAN.json, the file that `skirl place` wrote")
    return PlacementPlan.load(named[1]), named[2]


def _placed(spec: str, layout: "Layout | Mapping[int, Record]", rows: Mapping[int, int] | None) -> "Store":
    """Open the stores of a plan as one store."""
    from skirl.store.own_folder import inside
    from skirl.store.placed.store import PlacedStore

    plan, folder = plan_of(spec)
    with ExitStack() as opened:
        stores = [
            opened.enter_context(open_store(inside(site.store, folder), layout, rows=rows)) for site in plan.sites
        ]
        store = PlacedStore(plan, stores, layout, rows=rows)
        opened.pop_all()
        return store
