"""The part of a store that belongs to one of several trainers: a folder of its own, even for the last trainer left."""

from pathlib import Path


def own_folder(store: str, rank: int, *, among_others: bool) -> str:
    """Return the spec of one trainer's own folder in a store on disk or on nodes. Other stores' specs stay as they are.

    A trainer that is alone uses the first trainer's folder if there is one, so that a job that lost all its other
    trainers goes on there.

    >>> own_folder("memory", 1, among_others=True), own_folder("disk:no such folder", 0, among_others=False)
    ('memory', 'disk:no such folder')
    >>> own_folder("rpc://127.0.0.1:29400", 1, among_others=True)
    'rpc://127.0.0.1:29400/rank-1'
    """
    if store.startswith("placed:"):
        return f"{store}/rank-{rank}" if among_others else store
    if "rpc://" in store:
        return f"{store}/rank-{rank}"
    before, disk, path = store.partition("disk:")
    if not disk or not path:
        return store
    if not among_others and not (Path(path) / "rank-0").is_dir():
        return store
    return f"{before}{disk}{path}/rank-{rank}"


def inside(store: str, folder: str | None) -> str:
    """Return the spec of a folder inside a store of a plan.

    >>> inside("memory", "adam"), inside("rpc://127.0.0.1:29400", "rank-1"), inside("rpc://127.0.0.1:29400", None)
    ('memory', 'rpc://127.0.0.1:29400/rank-1', 'rpc://127.0.0.1:29400/rank-0')
    """
    if folder is None:
        return own_folder(store, 0, among_others=False)
    if "rpc://" in store:
        return f"{store}/{folder}"
    before, disk, path = store.partition("disk:")
    if not disk:
        return store
    return f"{before}{disk}{path}/{folder}"
