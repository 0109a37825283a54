"""The meaning of a cache size, and the slots and staging rows that it gives to each bank."""

import re
from collections.abc import Callable, Sequence
from numbers import Integral

from skirl.engine.too_small import Room, too_small
from skirl.tools.machine import free_bytes
from skirl.tools.units import parse_bytes

CacheSize = int | str
AUTO = 0.5
"""Share of the free memory when training begins. The rest is for the model, its activations and what comes later."""


def parse_cache(cache: CacheSize) -> tuple[str, float]:
    """Parse a cache size: ("rows", n), ("share", of all rows), ("bytes", n) or ("auto", share of the free memory).

    >>> parse_cache(1000), parse_cache("10%"), parse_cache("1MiB"), parse_cache("auto")
    (('rows', 1000), ('share', 0.1), ('bytes', 1048576), ('auto', 0.5))
    """
    if cache == "auto":
        return "auto", AUTO
    if isinstance(cache, Integral) and not isinstance(cache, bool):
        cache = int(cache)  # numpy's integers too
    if isinstance(cache, bool) or not isinstance(cache, int | str):
        raise TypeError(
            f"cache is a {type(cache).__name__}: set it to a number of rows, a share like '10%', a size like '4GiB' or "
            "'auto'"
        )
    if isinstance(cache, int):
        if cache < 1:
            raise ValueError(f"cache is {cache} rows: set it to 1 or more")
        return "rows", cache
    share = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", cache)
    if share:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"cache is {cache!r}: set it to a share above 0% and up to 100%")
        return "share", float(share[1]) / 100
    try:
        size = parse_bytes(cache)
    except ValueError:
        raise ValueError(
            f"cache is {cache!r}: set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'"
        ) from None
    if size < 1:
        raise ValueError(f"cache is {cache!r}: set it to 1 byte or more")
    return "bytes", size


def split_cache(
    cache: CacheSize,
    *,
    rows: Sequence[int],
    record_bytes: Sequence[int],
    dims: Sequence[int],
    distinct: Sequence[int],
    largest: Sequence[int],
    in_flight: int,
    free: Callable[[], int] = free_bytes,
    batch: str = "one batch of the first window",
) -> tuple[list[int], list[int]]:
    """Return the slots of each bank, and the rows in flight that its staging holds in addition.

    Every bank gets what one batch needs and at least one slot. The rest is shared out by demand.

    >>> split_cache(100, rows=[900, 90], record_bytes=[64, 32], dims=[16, 8],
    ...             distinct=[60, 20], largest=[10, 5], in_flight=3)
    ([73, 26], [30, 15])
    """
    banks = range(len(rows))
    floors = [min(rows[i], largest[i]) for i in banks]
    room, staging = room_of(
        cache, rows=rows, record_bytes=record_bytes, dims=dims, largest=largest, in_flight=in_flight, free=free
    )
    weights, budget = room.weights, room.budget
    # If there is one bank and the cache is in rows, the planner says which batch does not fit.
    if int(room.needs([largest])[0]) > budget and (len(rows) > 1 or room.staging is not None):
        raise too_small(room, [largest], lambda _: batch)
    if len(rows) == 1:
        floors = [1]
    # A bank that the first window does not use will be used later. Count it as one row, so that it gets more than one slot.
    demand = [max(1, n) for n in distinct]
    return [max(1, slots) for slots in _share(budget, weights, floors, rows, demand)], staging


def room_of(
    cache: CacheSize,
    *,
    rows: Sequence[int],
    record_bytes: Sequence[int],
    dims: Sequence[int],
    largest: Sequence[int],
    in_flight: int,
    free: Callable[[], int] = free_bytes,
) -> tuple[Room, list[int]]:
    """Return the room that a cache has for rows, and each bank's staging rows. Takes the arguments of `split_cache`."""
    kind, amount = parse_cache(cache)
    if kind == "auto":
        kind, amount = "bytes", int(amount * free())
    staging = [max(1, in_flight * n) for n in largest]
    if kind != "bytes":
        budget = int(amount) if kind == "rows" else max(1, int(amount * sum(rows)))
        return Room(cache, budget, None, [1] * len(rows), rows, dims), staging
    # Staging is part of the bytes, but at most half of them, so that a small cache still holds rows.
    wish = sum(n * width for n, width in zip(staging, record_bytes, strict=True))
    if 2 * wish > amount:
        staging = [max(1, int(n * amount / 2 / wish)) for n in staging]
    taken = sum(n * width for n, width in zip(staging, record_bytes, strict=True))
    return Room(cache, int(amount) - taken, taken, list(record_bytes), rows, dims), staging


def _share(
    budget: int, weights: Sequence[int], floors: Sequence[int], rows: Sequence[int], demand: Sequence[int]
) -> list[int]:
    """Return each bank's slots: its floor, and a part of the rest by demand. What a bank cannot use goes to others."""
    slots = list(floors)
    growing = [i for i in range(len(slots)) if slots[i] < rows[i]]
    spare = budget - sum(slot * weight for slot, weight in zip(slots, weights, strict=True))
    while growing and spare > 0:
        total = sum(demand[i] * weights[i] for i in growing)
        more = {i: spare * demand[i] // total for i in growing}
        full = [i for i in growing if slots[i] + more[i] >= rows[i]]
        for i in full:
            spare -= (rows[i] - slots[i]) * weights[i]
            slots[i] = rows[i]
            growing.remove(i)
        if not full:
            for i in growing:
                slots[i] += more[i]
            break
    return slots
