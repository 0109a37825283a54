"""How many rows of each bank the cache holds, for one size of all, and what to say where a batch does not fit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.core.tables import Schema
from skirl.tools.machine import free_bytes
from skirl.tools.units import parse_bytes


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


@dataclass(frozen=True)
class BankMemory:
    """Memory that one bank takes, apart from the store.

    >>> print(BankMemory(dim=64, rows=1_000_000, slots=50_000, staging_rows=4_000, record_bytes=260, staging_bytes=900_000))
    dim 64: 50,000 of 1,000,000 rows in the cache (12.4 MiB), 4,000 on their way (1.0 MiB; 0.9 MiB allocated)
    """

    dim: int
    rows: int
    """Rows of all its tables."""
    slots: int
    """Rows that the cache holds."""
    staging_rows: int
    """Most rows on their way in addition to those. A step that needs more goes alone."""
    record_bytes: int
    staging_bytes: int
    """Bytes of the staging buffers now."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and of staging, as planned."""
        return (self.slots + self.staging_rows) * self.record_bytes

    def __str__(self) -> str:
        cache, staging = self.slots * self.record_bytes, self.staging_rows * self.record_bytes
        return (
            f"dim {self.dim}: {self.slots:,} of {self.rows:,} rows in the cache ({cache / (1 << 20):.1f} MiB), "
            f"{self.staging_rows:,} on their way ({staging / (1 << 20):.1f} MiB; {self.staging_bytes / (1 << 20):.1f} MiB "
            "allocated)"
        )


@dataclass(frozen=True)
class CacheSplit:
    """Slots of each bank, and rows that may be on their way in addition."""

    slots: list[int]
    staging_rows: list[int]


class Capacity:
    """The size of one engine's cache: how it is split now, and how it would be split for other batches.

    The split follows the demand of a run's first batches, and changes if a later batch does not fit. It depends only on
    the data, and with "auto" on the memory that is free at first.

    >>> from skirl import Table
    >>> capacity = Capacity(10, Schema.of([Table("a", 100, 4), Table("b", 100, 8)]), [16, 32], lambda: 0)
    >>> capacity.decide([[7, 1], [2, 8]], [8, 8], in_flight=1, number=0).slots
    [8, 2]
    >>> capacity.decide([[2, 8]], [2, 8], in_flight=1, number=1).slots
    [2, 8]
    >>> capacity.decide([[5, 6]], [5, 6], in_flight=1, number=2)
    Traceback (most recent call last):
    skirl.engine.capacity.DoesNotFit: cache 10 is 10 rows, batch 2 needs 11 (6 of dim 8): set cache to 11 or more, or use smaller batches; `skirl size` says what a whole run needs
    """  # noqa: E501

    def __init__(
        self,
        cache: CacheSize,
        schema: Schema,
        record_bytes: Sequence[int],
        free: Callable[[], int],
        sites: int = 1,
        near: int = 1,
    ) -> None:
        kind, share = parse_cache(cache)
        self.cache = cache
        if sites > 1 and kind == "share":  # of the rows that this trainer owns
            self.cache = max(1, int(share * sum(table.rows for table in schema.tables) / sites))
        self.split: CacheSplit | None = None
        """None until the first batches have decided it."""
        self.by_one = False
        """True if a batch that was looked up alone decided the split. A lookahead decides by its window instead."""
        self._schema = schema
        self._record_bytes = list(record_bytes)
        self._free = lambda: free() // near
        self._largest = np.zeros(len(schema.banks), np.int64)
        """Rows of each bank in the largest batch that a split was made for."""
        self._auto: str | None = None
        """The size that "auto" stands for, once that is decided."""

    @property
    def halves(self) -> list[int]:
        """For each bank: rows that may be on their way in; as many more may be on their way out."""
        return [rows // 2 for rows in self.split.staging_rows] if self.split else []

    def sizes(self, record_bytes: Sequence[int], staging_bytes: Sequence[int]) -> list[BankMemory]:
        """Return what each bank takes. Empty until a split is decided."""
        tables, split = self._schema.tables, self.split
        if split is None:
            return []
        return [
            BankMemory(bank.dim, sum(tables[t].rows for t in bank.tables), slots, staging, one, allocated)
            for bank, slots, staging, one, allocated in zip(
                self._schema.banks, split.slots, split.staging_rows, record_bytes, staging_bytes, strict=True
            )
        ]

    def decide(
        self, needs: Sequence[Sequence[int]], distinct: Sequence[int], *, in_flight: int, number: int | None
    ) -> CacheSplit:
        """Return a split that holds batch `number`, and as many of the batches after it as possible."""
        each = np.array(needs, np.int64)
        whole = np.maximum(each.max(axis=0), self._largest)
        for largest in (whole, *(each[:n].max(axis=0) for n in range(len(each), 1, -1))):
            try:
                return self._split_for(largest, distinct, in_flight, number)
            except DoesNotFit:
                continue
        try:
            return self._split_for(each[0], distinct, in_flight, number)
        except DoesNotFit:
            raise self.refusal(needs, in_flight=in_flight, number=number) from None

    def check(self, needs: Sequence[int], *, in_flight: int, number: int) -> None:
        """Raise if no split holds batch `number`. `needs`: its distinct rows of each bank."""
        largest = self._largest
        self._split_for(np.array(needs, np.int64), needs, in_flight, number)
        self._largest = largest

    def check_run(self, needs: Sequence[Sequence[int]], *, in_flight: int) -> None:
        """Raise if a run whose batches are all known has one that no split holds.

        `needs`: for each of its batches, the distinct rows of each bank.
        """
        if self.cache == "auto" or not len(needs):
            return
        room, _ = self._room(needs[0], in_flight)
        # A bank without a row in the batches that decide still gets one slot, beyond the budget.
        most = room.budget + len(self._rows) - 1 if room.staging is None else int(parse_cache(self.cache)[1])
        large = np.flatnonzero(room.needs(needs) > most)
        if len(large):
            raise self.refusal(needs, in_flight=in_flight, number=0, at=int(large[0]), whole=True)

    def refusal(
        self, needs: Sequence[Sequence[int]], *, in_flight: int, number: int | None, at: int = 0, whole: bool = False
    ) -> DoesNotFit:
        """Return the error for a batch that no split holds."""
        room, _ = self._room(needs[at], in_flight)
        room = replace(room, cache=self.cache)  # not the bytes that "auto" stands for
        return too_small(room, needs, lambda i: _named(None if number is None else number + i), at=at, whole=whole)

    def _room(self, largest: Sequence[int], in_flight: int) -> tuple[Room, list[int]]:
        return room_of(
            self._auto or self.cache,
            rows=self._rows,
            record_bytes=self._record_bytes,
            dims=[bank.dim for bank in self._schema.banks],
            largest=largest,
            in_flight=in_flight,
            free=self._free,
        )

    def _split_for(
        self, largest: np.ndarray, distinct: Sequence[int], in_flight: int, number: int | None
    ) -> CacheSplit:
        """Return a split that holds this many rows of each bank at the same time."""
        slots, staging = split_cache(
            self._auto or self.cache,
            rows=self._rows,
            record_bytes=self._record_bytes,
            dims=[bank.dim for bank in self._schema.banks],
            distinct=distinct,
            largest=largest.tolist(),
            in_flight=in_flight,
            free=self._free,
            batch=_named(number),
        )
        self._largest = np.maximum(self._largest, largest)
        return CacheSplit(slots, staging)

    def take(self, split: CacheSplit) -> None:
        """Use this split from now on."""
        self.split = split
        if self.cache == "auto":
            self._auto = f"{self._bytes(split.slots) + self._bytes(split.staging_rows)}B"

    def forget(self) -> None:
        """Forget the split: there is no cache, and the next batches decide."""
        self.split, self.by_one = None, False

    @property
    def saved(self) -> dict[str, Any] | None:
        """The split, to save for a resumed run; None if it is not decided."""
        if self.split is None:
            return None
        return {"cache": self.cache, "slots": self.split.slots, "staging_rows": self.split.staging_rows}

    def saved_split(self, saved: dict[str, Any] | None) -> CacheSplit | None:
        """Return the split that a run was saved with, or None if its cache had another size than this one."""
        if saved is None or saved["cache"] != self.cache:
            return None
        return CacheSplit(list(saved["slots"]), list(saved["staging_rows"]))

    def allows(self, saved: Any) -> bool:
        """Return False only if `saved`, of a cache of this size, is no split that it could have. It may be from a file."""
        if saved is None or saved["cache"] != self.cache:
            return True
        kind, amount = parse_cache(self.cache)
        banks = self._rows
        counts = [*saved["slots"], *saved["staging_rows"]]
        if len(counts) != 2 * len(banks) or not all(type(n) is int and 0 < n < MAX_ROWS for n in counts):
            return False
        weights = self._record_bytes if kind == "bytes" else [1 for _ in banks]
        most = amount * sum(banks) if kind == "share" else amount
        most = max(1, most) + sum(weights[1:])  # a bank that no batch had a row of still has one slot
        taken = sum(n * weight for n, weight in zip(saved["slots"], weights, strict=True))
        if kind == "auto":  # another machine may have had more memory: the split stays, so it has to fit here
            taken, most = self._bytes(saved["slots"]) + self._bytes(saved["staging_rows"]), max(1, self._free())
        return all(n <= rows for n, rows in zip(saved["slots"], banks, strict=True)) and taken <= most

    @property
    def _rows(self) -> list[int]:
        return [sum(self._schema.tables[t].rows for t in bank.tables) for bank in self._schema.banks]

    def _bytes(self, counts: Sequence[int]) -> int:
        return sum(n * width for n, width in zip(counts, self._record_bytes, strict=True))


def _named(number: int | None) -> str:
    return "this batch" if number is None else f"batch {number}"
