"""The error for a cache that does not hold a batch: what was needed, by which batch, and a size that holds all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


class DoesNotFit(ValueError):
    """A batch needs more rows at the same time than the whole cache holds."""

    def __init__(self, found: str, enough: int, in_bytes: bool, hint: str) -> None:
        size = f"{enough} bytes or more ('{enough}B')" if in_bytes else f"{enough} or more"
        super().__init__(f"{found}: set cache to {size}, or use smaller batches{hint}")
        self.found, self.enough, self.in_bytes, self.hint = found, enough, in_bytes, hint

    def __reduce__(self) -> tuple[type["DoesNotFit"], tuple[str, int, bool, str]]:
        return type(self), (self.found, self.enough, self.in_bytes, self.hint)


@dataclass(frozen=True)
class Room:
    """The room that a cache has for rows, and its unit."""

    cache: object
    """The size, as it was given."""
    budget: int
    """Room in rows, or in bytes without staging."""
    staging: int | None
    """Bytes for rows on their way, if the cache is a number of bytes."""
    weights: Sequence[int]
    """The part of the budget that a row of each bank takes."""
    rows: Sequence[int]
    """Rows of each bank's tables."""
    dims: Sequence[int]

    def needs(self, batches: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Return how much of the budget each batch needs, given its distinct rows of each bank."""
        return np.minimum(np.array(batches, np.int64).reshape(-1, len(self.rows)), self.rows) @ np.array(self.weights)

    def enough(self, need: int) -> int:
        """Return a cache size that surely holds batches with this need. In bytes, at most half of it is staging."""
        return need if self.staging is None else 2 * (need + sum(self.weights))


def too_small(
    room: Room, batches: Sequence[Sequence[int]], name: Callable[[int], str], *, at: int = 0, whole: bool = False
) -> DoesNotFit:
    """Return the error. It asks for what the largest known batch needs, so that the next one is not refused too.

    >>> room = Room(20, 20, None, [1, 1], [99, 99], [4, 8])
    >>> print(too_small(room, [[9, 15], [20, 16], [2, 2]], "batch {}".format))
    cache 20 is 20 rows, batch 0 needs 24 (15 of dim 8), and batch 1 needs 36, the most of the 3 batches read so far: \
set cache to 36 or more, or use smaller batches; `skirl size` says what a whole run needs
    """
    needs = room.needs(batches)
    most = int(needs.argmax()) if len(needs) else at
    if needs[most] == needs[at]:
        most = at
    floors = np.minimum(batches[at], room.rows)
    widest = int(floors.argmax())
    of_dim = f" ({floors[widest]:,} of dim {room.dims[widest]})" if len(room.dims) > 1 else ""
    scope = "the whole run" if whole else f"the {len(needs):,} batches read so far"
    also = "" if most == at else f", and {name(most)} needs {needs[most]:,}"
    also += f", the most of {scope}" if len(needs) > 1 else ""
    enough = room.enough(int(needs[most]))
    hint = "" if whole else "; `skirl size` says what a whole run needs"
    if room.staging is None:
        found = f"cache {room.cache!r} is {room.budget:,} rows, {name(at)} needs {needs[at]:,}{of_dim}{also}"
        return DoesNotFit(found, enough, False, hint)
    found = (
        f"cache {room.cache!r} has {max(0, room.budget):,} bytes for rows and {room.staging:,} for staging (rows on their "
        f"way, at most half), {name(at)} needs {needs[at]:,}{of_dim}{also}"
    )
    return DoesNotFit(found, enough, True, hint)
