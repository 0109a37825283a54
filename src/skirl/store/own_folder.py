"""Which rows of a store are a trainer's among others: on disk in a folder of its own, also when it is the only one left."""

import os
from pathlib import Path


def own_folder(store: str, rank: int, *, among_others: bool) -> str:
    """A store on disk or on nodes as that of one trainer: what one owns no other writes. Any other store as it is.

    A trainer that is alone takes the first one's, where there is such a folder: a job that loses all others goes on there.

    **Arguments**

    - `store`: as the user names it.
    - `rank`: of the trainer.
    - `among_others`: whether there are others, or may be at the next start.

    >>> own_folder("memory", 1, among_others=True), own_folder("disk:no such folder", 0, among_others=False)
    ('memory', 'disk:no such folder')
    >>> own_folder("rpc://127.0.0.1:29400", 1, among_others=True)
    'rpc://127.0.0.1:29400/rank-1'
    """
    if "placed:" in store:
        return f"{store}/rank-{rank}" if among_others else store
    if "rpc://" in store:
        return f"{store}/rank-{rank}"
    before, disk, path = store.partition("disk:")
    if not disk or not path:
        return store
    if not among_others and not (Path(path) / "rank-0").is_dir():
        return store
    os.makedirs(path, exist_ok=True)  # all trainers at once
    return f"{before}{disk}{path}/rank-{rank}"


def inside(store: str, folder: str | None) -> str:
    """A store of a plan, in a folder of its own inside its own; None: as it is, or the first trainer's where there is one.

    **Arguments**

    - `store`: as the plan names it.
    - `folder`: the folder's name.

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
    os.makedirs(path, exist_ok=True)
    return f"{before}{disk}{path}/{folder}"
