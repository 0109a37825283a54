"""Stores: they hold the rows that are not on the device."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.store.base import Layout, Record, Store
    from skirl.store.checkpoint_rows import CheckpointRows
    from skirl.store.disk.store import DiskError, DiskFull, DiskStore
    from skirl.store.memory import MemoryStore

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


__getattr__ = lazily(__name__)


def open_store(
    spec: "str | Store", layout: "Layout | Mapping[int, Record]", *, rows: Mapping[int, int] | None = None
) -> "Store":
    """Return the store that a user's `store=` names.

    **Arguments**

    - `spec`: "memory", "disk:FOLDER", "rpc://HOST:PORT" (memory nodes that meet there), a list of these with weights, such
      as "disk:a,disk:b*2", "checkpoint" (the rows that `skirl.load` finds, read-only), or a `Store`, which is checked and
      used.
    - `layout`: the records of each table.
    - `rows`: number of rows of each table, which halves the memory of a disk store's index. None: not known.

    >>> from skirl.store import Record
    >>> len(open_store("memory", {0: Record(65)}))
    0
    """
    from skirl.store.base import Layout, Store
    from skirl.store.specs import shards

    if isinstance(spec, Store):
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        if spec.layout != layout:
            raise ValueError(f"the store given has {spec.layout}, the tables need {layout}: open it with the latter")
        return spec
    if spec == "checkpoint":
        from skirl.store.checkpoint_rows import CheckpointRows

        return CheckpointRows(layout, rows=rows)
    found = shards(spec)
    if len(found) > 1:
        from skirl.store.sharded import ShardedStore

        with ExitStack() as opened:
            stores = [opened.enter_context(open_store(one, layout, rows=rows)) for one, _ in found]
            store = ShardedStore(stores, [weight for _, weight in found], layout)
            opened.pop_all()
            return store
    if spec == "memory":
        from skirl.store.memory import MemoryStore

        return MemoryStore(layout)
    if spec.startswith("disk:"):
        from skirl.store.disk.store import DiskStore

        return DiskStore(spec.removeprefix("disk:"), layout, rows=rows)
    from skirl.store.remote.store import RemoteStore

    return RemoteStore(spec, layout, rows=rows)
