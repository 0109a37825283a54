"""Rows of one call by their sites, and back; and the facts of frozen rows of several stores in one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import DISK_ROWS, MEMORY_ROWS, Facts
from skirl.tools.jit import kernel

LISTS = {MEMORY_ROWS: "files", DISK_ROWS: "segments"}
"""Of each kind of frozen rows: the list of what they are made of."""


@kernel
def by_site(sites: NDArray[np.int32], starts: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Where the rows of each site are among all: order[starts[s]:starts[s + 1]], ascending; `starts` comes as zeros.

    >>> starts, order = np.zeros(3, np.int64), np.empty(4, np.int64)
    >>> by_site(np.array([1, 0, 1, 1], np.int32), starts, order)
    >>> starts.tolist(), order.tolist()
    ([0, 1, 4], [1, 0, 2, 3])
    """
    for i in range(sites.size):
        starts[sites[i] + 1] += 1
    for s in range(1, starts.size):
        starts[s] += starts[s - 1]
    at = starts.copy()
    for i in range(sites.size):
        order[at[sites[i]]] = i
        at[sites[i]] += 1


@kernel
def take(rows: Any, order: NDArray[np.int64], out: Any) -> None:
    """out[i] = rows[order[i]], row by row."""
    for i in range(order.size):
        for j in range(rows.shape[1]):
            out[i, j] = rows[order[i], j]


@kernel
def give(rows: Any, order: NDArray[np.int64], out: Any) -> None:
    """out[order[i]] = rows[i], row by row."""
    for i in range(order.size):
        for j in range(rows.shape[1]):
            out[order[i], j] = rows[i, j]


def joined(parts: Sequence[Facts], placement: str) -> Facts:
    """The facts of frozen rows of several nodes or sites: of one store that holds them all, as any store can take them.

    **Arguments**

    - `parts`: what each of them has written.
    - `placement`: the digest of how rows are cut over them.

    >>> each = [{"kind": "rows", "identity": i, "generation": 3, "files": [i]} for i in "ab"]
    >>> facts = joined(each, "d")
    >>> facts["files"], facts["identity"], [part["files"] for part in own_parts(facts, "d")], own_parts(facts, "e")
    (['a', 'b'], 'a', [['a'], ['b']], None)
    """
    first, name = parts[0], LISTS[parts[0]["kind"]]
    if any(part["kind"] != first["kind"] for part in parts):
        raise ValueError("some rows are in memory and some on disk: have all nodes, or all sites, of one kind")
    points = [
        [part["identity"], part["generation"], len(part[name]), part.get("rows", []), part.get("nodes")]
        for part in parts
    ]
    facts = first | {
        "generation": max(part["generation"] for part in parts),
        name: [each for part in parts for each in part[name]],
        "nodes": {"placement": placement, "points": points},
    }
    if all(part.get("rows") for part in parts):
        facts["rows"] = np.sum([part["rows"] for part in parts], axis=0).tolist()
    return facts


def own_parts(facts: Facts, placement: str) -> list[Facts] | None:
    """What `joined` joined, if rows are cut over the nodes now as they were then; else None.

    **Arguments**

    - `facts`: of frozen rows.
    - `placement`: the digest of how rows are cut over the nodes or sites.
    """
    try:
        nodes, name = facts["nodes"], LISTS[facts["kind"]]
        if nodes["placement"] != placement:
            return None
        found, start = [], 0
        for identity, generation, count, rows, *inner in nodes["points"]:
            point = {"identity": identity, "generation": generation, name: facts[name][start : start + count]}
            point |= ({"rows": rows} if rows else {}) | ({"nodes": inner[0]} if inner and inner[0] else {})
            found.append({k: v for k, v in facts.items() if k != "nodes"} | point)
            start += count
    except (KeyError, TypeError, ValueError):
        return None
    return found if start == len(facts[name]) else None
