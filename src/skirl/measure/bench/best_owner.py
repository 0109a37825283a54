"""The least that could cross between trainers if rows moved between owners, chosen with knowledge of the future."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from skirl.core.placement import Placement
from skirl.tools.jit import kernel


class Used(Protocol):
    """The distinct rows of a step."""

    keys: np.ndarray
    """int64."""
    users: np.ndarray
    """uint64: a bit for each trainer that uses the row."""


def best_owners(
    number: Callable[[np.ndarray], np.ndarray], steps: Sequence[Used], ranks: int, dim: int, moves: Sequence[int]
) -> tuple[list[int], int]:
    """Return how many numbers cross in all steps: with the best owners, for each cost of a move, and with owners by key.

    A use costs a value to, and a gradient from, every user but the owner. A row's first owner is free to choose, and it
    may change before any later use. Rows do not depend on each other, so the least is found exactly.

    **Arguments**

    - `number`: maps keys to row numbers, from 0 on.
    - `steps`: the steps, in order.
    - `ranks`: the number of trainers.
    - `dim`: numbers in a row's vector.
    - `moves`: costs of moving a row, each the numbers in a record.
    """
    placement, by_key = Placement.even(ranks), 0
    rows = [number(step.keys).astype(np.int32) for step in steps]
    present = np.zeros(max((int(part.max(initial=0)) for part in rows), default=0) + 1, np.int32)
    for part, step in zip(rows, steps):
        present[part] += 1
        users = _bits(step.users)
        owned = (step.users >> placement.site_of(step.keys).astype(np.uint64)) & np.uint64(1)
        by_key += 2 * dim * int((users - owned.astype(np.int64)).sum())
    ends = np.cumsum(present, dtype=np.int64)
    at, masks = ends - present, np.empty(int(ends[-1]), np.uint64)
    for part, step in zip(rows, steps):
        masks[at[part]] = step.users
        at[part] += 1
    return [int(_least(ends, masks, ranks, 2 * dim, move)) for move in moves], by_key


def _bits(masks: np.ndarray) -> np.ndarray:
    """Return how many bits of each mask are set."""
    return np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1, dtype=np.int64)


@kernel
def _least(ends: Any, masks: Any, ranks: int, use: int, move: int) -> int:
    """Return the least cost of all rows. masks: users of each use, row after row; ends: where each row's uses end."""
    total, begin = 0, 0
    cost = np.empty(ranks, np.int64)
    for end in ends:
        if begin == end:
            continue
        cost[:] = 0
        low = 0
        for i in range(begin, end):
            if i > begin:
                for owner in range(ranks):
                    cost[owner] = min(cost[owner], low + move)
            users = 0
            for owner in range(ranks):
                users += np.int64((masks[i] >> np.uint64(owner)) & np.uint64(1))
            for owner in range(ranks):
                cost[owner] += use * (users - np.int64((masks[i] >> np.uint64(owner)) & np.uint64(1)))
            low = cost[0]
            for owner in range(ranks):
                low = min(low, cost[owner])
        total += low
        begin = end
    return total
