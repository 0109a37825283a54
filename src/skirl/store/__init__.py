"""Stores: they hold the rows that are not on the device; and their names: one, or a list with weights, such as
`disk:a,disk:b*2`."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from skirl.tools import lazily

if TYPE_CHECKING:
    from skirl.store.base import Layout, Record, Store
    from skirl.store.disk.store import CheckpointRows, DiskError, DiskFull, DiskStore
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

    if isinstance(spec, Store):
        layout = layout if isinstance(layout, Layout) else Layout(layout)
        if spec.layout != layout:
            raise ValueError(f"the store given has {spec.layout}, the tables need {layout}: open it with the latter")
        return spec
    if spec == "checkpoint":
        from skirl.store.disk.store import CheckpointRows

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


def _split(spec: str) -> list[tuple[str, str]]:
    """Return each store of a list and the text of its weight, with its asterisk."""
    if "," not in spec:
        return [(spec, "")]
    ends = [(item, re.search(r"(\*[^*/]*)?$", item)) for item in spec.split(",")]
    return [(item[: end.start()], end[0]) for item, end in ends if end is not None]


def shards(spec: str) -> list[tuple[str, int]]:
    """Return the stores that a spec names, with their weights. Raise a ValueError unless each can be opened.

    >>> shards("disk:a,rpc://10.0.0.5:7000*2")
    [('disk:a', 1), ('rpc://10.0.0.5:7000', 2)]
    """
    out: list[tuple[str, int]] = []
    for store, weight in _split(spec):
        if store.startswith("rpc:"):
            from skirl.store.remote.meeting import Address

            Address.parse(store)
        elif store != "memory" and not re.fullmatch("disk:.+", store):
            where = f", a list in which {store!r} is no store" if "," in spec else ""
            raise ValueError(
                f"store is {spec!r}{where}: set it to memory, disk:FOLDER, rpc://HOST:PORT, or a list of these with "
                "weights, such as disk:a,disk:b*2"
            )
        if not re.fullmatch(r"(\*[1-9][0-9]*)?", weight):
            raise ValueError(
                f"store is {spec!r}: the weight of {store} is {weight[1:]!r}, set it to a whole number above 0"
            )
        if store != "memory" and any(store == other for other, _ in out):
            raise ValueError(f"store is {spec!r}, which has {store} twice: name it once, with a weight")
        out.append((store, int(weight[1:] or 1)))
    return out


def inside(spec: str, folder: str) -> str:
    """Return the spec of a folder in each store on disk. Other stores stay as they are.

    >>> inside("memory,disk:b*2", "adam")
    'memory,disk:b/adam*2'
    """
    return ",".join(
        f"{store}/{folder}{weight}" if store.startswith("disk:") else store + weight for store, weight in _split(spec)
    )


def own_part(spec: str, rank: int, *, among_others: bool, cut: str = "") -> str:
    """Return the spec of one trainer's own part of stores on disk or on nodes. Other stores stay as they are. `cut`: a mark
    of its columns of tables that are cut, since a run that goes on with others has other records.

    A trainer that is alone uses the first trainer's part if there is one, so that a job that lost all its other trainers
    goes on there.
    """

    def part(store: str) -> str:
        disk = store.startswith("disk:")
        divided = disk and (among_others or (Path(store.removeprefix("disk:")) / "rank-0").is_dir())
        return f"{store}/rank-{rank}{cut}" if divided or store.startswith("rpc:") else store

    return ",".join(part(store) + weight for store, weight in _split(spec))
