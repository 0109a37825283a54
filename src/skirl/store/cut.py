"""Split the rows of one call by site and put them back together; join the facts of several stores' frozen rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import DISK_ROWS, MEMORY_ROWS, Facts
from skirl.tools.jit import kernel

LISTS = {MEMORY_ROWS: "files", DISK_ROWS: "segments"}
"""Name of the list in the facts that has the files or segments, for each kind of frozen rows."""


@kernel
def by_site(sites: NDArray[np.int32], starts: NDArray[np.int64], order: NDArray[np.int64]) -> None:
    """Group row indices by site: those of site s are order[starts[s]:starts[s + 1]], ascending. `starts` begins as zeros.

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
    """Set out[i] = rows[order[i]] for each i."""
    for i in range(order.size):
        for j in range(rows.shape[1]):
            out[i, j] = rows[order[i], j]


@kernel
def give(rows: Any, order: NDArray[np.int64], out: Any) -> None:
    """Set out[order[i]] = rows[i] for each i."""
    for i in range(order.size):
        for j in range(rows.shape[1]):
            out[order[i], j] = rows[i, j]


def joined(parts: Sequence[Facts], placement: str) -> Facts:
    """Join the facts of several nodes' or sites' frozen rows into facts of one store, which any store can take.

    >>> each = [{"kind": "rows", "identity": i, "generation": 3, "files": [i]} for i in "ab"]
    >>> facts = joined(each, "d")
    >>> facts["files"], facts["identity"], [part["files"] for part in own_parts(facts, "d")], own_parts(facts, "e")
    (['a', 'b'], 'a', [['a'], ['b']], None)
    """
    first, name = parts[0], LISTS[parts[0]["kind"]]
    if any(part["kind"] != first["kind"] for part in parts):
        raise ValueError("some rows are in memory and some on disk: set all nodes, or all sites, to the same kind")
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
    """Return the parts that `joined` put together, or None if rows were split among the nodes differently then."""
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
