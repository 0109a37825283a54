"""Where rows live when they are not on the device."""

from collections.abc import Mapping

from skirl.store.base import Layout, Record, Store
from skirl.store.checkpoint_rows import CheckpointRows
from skirl.store.disk.store import DiskError, DiskFull, DiskStore
from skirl.store.link import Link, LinkStore, split_spec
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


def open_store(
    spec: str | Store, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None
) -> Store:
    """The store that a user's `store=` names.

    **Arguments**

    - `spec`: "memory", "disk:FOLDER", "rpc://HOST:PORT" (memory nodes that meet there), "link:RATE,DELAY:STORE",
      "checkpoint" (those that `skirl.load` finds, to read only), or a `Store`, which is checked and used.
    - `layout`: the records of each table.
    - `rows`: how many rows each table has. A disk store then needs half the memory for its index; None: not known.

    >>> len(open_store("memory", {0: Record(65)}))
    0
    """
    if isinstance(spec, Store):
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        if spec.layout != layout:
            raise ValueError(f"the store given has {spec.layout}, the tables need {layout}: open it with the latter")
        return spec
    if spec == "memory":
        return MemoryStore(layout)
    if spec == "checkpoint":
        return CheckpointRows(layout, rows=rows)
    if spec.startswith("disk:") and spec != "disk:":
        return DiskStore(spec.removeprefix("disk:"), layout, rows=rows)
    if spec.startswith("rpc:"):
        from skirl.store.remote.store import RemoteStore

        return RemoteStore(spec, layout, rows=rows)
    if spec.startswith("link:"):
        link, inner = split_spec(spec)
        return LinkStore(open_store(inner, layout, rows=rows), link)
    raise ValueError(
        f"store {spec!r} is not known, set it to 'memory', 'disk:FOLDER', 'rpc://HOST:PORT', 'link:RATE,DELAY:STORE', "
        "'checkpoint' or pass a skirl.store.Store"
    )
