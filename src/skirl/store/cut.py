"""Split the rows of one call by site and put them back together; join the facts of several stores' frozen rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts
from skirl.tools.jit import kernel


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
    """Join the facts of several stores' frozen rows into facts of one store, which any store can take.

    >>> each = [{"identity": i, "generation": 3, "segments": [i], "rows": [4]} for i in "ab"]
    >>> facts = joined(each, "d")
    >>> facts["segments"], facts["rows"], own_parts(facts, "d") == each, own_parts(facts, "e")
    (['a', 'b'], [8], True, None)
    """
    own = ("identity", "generation", "segments", "rows", "nodes")
    points = [{name: part[name] for name in own if name in part} for part in parts]
    return parts[0] | {
        "generation": max(part["generation"] for part in parts),
        "segments": [each for part in parts for each in part["segments"]],
        "rows": np.sum([part["rows"] for part in parts], axis=0).tolist(),
        "nodes": {"placement": placement, "points": [p | {"segments": len(p["segments"])} for p in points]},
    }


def own_parts(facts: Facts, placement: str) -> list[Facts] | None:
    """Return the parts that `joined` put together, or None if rows were split among the stores differently then."""
    try:
        if facts["nodes"]["placement"] != placement:
            return None
        found, start, common = [], 0, {name: value for name, value in facts.items() if name != "nodes"}
        for point in facts["nodes"]["points"]:
            end = start + point["segments"]
            found.append(common | point | {"segments": facts["segments"][start:end]})
            start = end
    except (KeyError, TypeError, ValueError):
        return None
    return found if start == len(facts["segments"]) else None
