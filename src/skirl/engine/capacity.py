"""How large the cache is, and how it is split between the banks: record widths of different dims."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.core.tables import Schema
from skirl.tools.machine import free_bytes
from skirl.tools.sizes import parse_bytes

CacheSize = int | str
AUTO = 0.5
"""Of the memory that is free when training begins: the rest is the model's, for activations and what comes later."""


class DoesNotFit(ValueError):
    """A batch needs more rows together than the whole cache holds."""


def parse_cache(cache: CacheSize) -> tuple[str, float]:
    """What a cache size means: ("rows", n), ("share", of all rows), ("bytes", n) or ("auto", share of the free memory).

    >>> parse_cache(1000), parse_cache("10%"), parse_cache("1MiB"), parse_cache("auto")
    (('rows', 1000), ('share', 0.1), ('bytes', 1048576), ('auto', 0.5))
    """
    if cache == "auto":
        return "auto", AUTO
    if isinstance(cache, Integral) and not isinstance(cache, bool):
        cache = int(cache)  # numpy's too
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
            raise ValueError(f"cache is {cache!r}: set a share above 0% and up to 100%")
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
    """Slots for each bank, and rows in flight that its staging holds beside them.

    Every bank gets what a batch needs, and at least one slot; the rest is shared out by demand.

    **Arguments**

    - `cache`: how large it is: rows, a share of all rows, bytes, or "auto".
    - `rows`: rows of each bank's tables.
    - `record_bytes`, `dims`: of a row of each bank.
    - `distinct`: distinct rows of each bank in the window that decides.
    - `largest`: those of its largest batch.
    - `in_flight`: steps whose rows may be on their way.
    - `free`: gives the bytes that are free where the cache will be; for "auto".
    - `batch`: what an error calls the batch that does not fit.

    >>> split_cache(100, rows=[900, 90], record_bytes=[64, 32], dims=[16, 8],
    ...             distinct=[60, 20], largest=[10, 5], in_flight=3)
    ([73, 26], [30, 15])
    """
    kind, amount = parse_cache(cache)
    if kind == "auto":
        kind, amount = "bytes", int(amount * free())
    banks = range(len(rows))
    floors = [min(rows[i], largest[i]) for i in banks]
    staging = [max(1, in_flight * largest[i]) for i in banks]
    weights = list(record_bytes) if kind == "bytes" else [1] * len(rows)
    if kind == "bytes":
        # Staging is counted in the bytes: at most half of them, so that a small cache stays a cache.
        wish = sum(staging[i] * weights[i] for i in banks)
        if 2 * wish > amount:
            staging = [max(1, int(staging[i] * amount / 2 / wish)) for i in banks]
        budget = int(amount) - sum(staging[i] * weights[i] for i in banks)
    else:
        budget = int(amount) if kind == "rows" else max(1, int(amount * sum(rows)))
    need = sum(floors[i] * weights[i] for i in banks)
    if need > budget and (len(rows) > 1 or kind == "bytes"):  # one bank: the planner names the batch that does not fit
        if kind == "bytes":
            enough = 2 * (need + sum(weights))
            raise DoesNotFit(
                f"cache {cache!r} leaves {max(0, budget)} bytes for rows, {batch} needs {need}: set cache to {enough} bytes "
                f"or more ('{enough}B'), or use smaller batches"
            )
        worst = max(banks, key=lambda i: floors[i])
        raise DoesNotFit(
            f"cache {cache!r} is {budget} rows, {batch} needs {need} ({floors[worst]} of dim {dims[worst]}): set cache to "
            f"{need} or more, or use smaller batches"
        )
    if len(rows) == 1:
        floors = [1]
    # A bank that the first window does not use at all will be used later: it counts as one row, lest it stay at one slot.
    demand = [max(1, n) for n in distinct]
    return [max(1, slots) for slots in _share(budget, weights, floors, rows, demand)], staging


def _share(
    budget: int, weights: Sequence[int], floors: Sequence[int], rows: Sequence[int], demand: Sequence[int]
) -> list[int]:
    """Slots for each bank: its floor, and of the rest in proportion to its demand; what a bank cannot use goes to others."""
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
class Size:
    """What one bank takes in memory beside the store.

    >>> print(Size(dim=64, rows=1_000_000, slots=50_000, staging_rows=4_000, record_bytes=260, staging_bytes=900_000))
    dim 64: 50,000 of 1,000,000 rows in the cache (12.4 MiB), 4,000 on their way (1.0 MiB; 0.9 MiB allocated)
    """

    dim: int
    rows: int
    """Of all its tables."""
    slots: int
    """Rows that the cache holds."""
    staging_rows: int
    """Rows on their way beside them, at most; one step that needs more goes alone."""
    record_bytes: int
    staging_bytes: int
    """Memory of staging buffers now."""

    @property
    def nbytes(self) -> int:
        """Cache and staging as planned."""
        return (self.slots + self.staging_rows) * self.record_bytes

    def __str__(self) -> str:
        cache, staging = self.slots * self.record_bytes, self.staging_rows * self.record_bytes
        return (
            f"dim {self.dim}: {self.slots:,} of {self.rows:,} rows in the cache ({cache / (1 << 20):.1f} MiB), "
            f"{self.staging_rows:,} on their way ({staging / (1 << 20):.1f} MiB; {self.staging_bytes / (1 << 20):.1f} MiB "
            "allocated)"
        )


@dataclass(frozen=True)
class Split:
    """Slots of each bank, and rows that may be on their way beside them."""

    slots: list[int]
    staging_rows: list[int]


class Capacity:
    """The cache of one engine: how it is split now, and how it would be split for other batches.

    It is split by the demand of a run's first batches, and again where a later batch does not fit: a function of the data.

    >>> from skirl import Table
    >>> capacity = Capacity(10, Schema.of([Table("a", 100, 4), Table("b", 100, 8)]), [16, 32], lambda: 0)
    >>> capacity.decide([[7, 1], [2, 8]], [8, 8], in_flight=1, number=0).slots
    [8, 2]
    >>> capacity.decide([[2, 8]], [2, 8], in_flight=1, number=1).slots
    [2, 8]
    >>> capacity.decide([[5, 6]], [5, 6], in_flight=1, number=2)
    Traceback (most recent call last):
    skirl.engine.capacity.DoesNotFit: cache 10 is 10 rows, batch 2 needs 11 (6 of dim 8): set cache to 11 or more, or use smaller batches
    """  # noqa: E501

    def __init__(self, cache: CacheSize, schema: Schema, record_bytes: Sequence[int], free: Callable[[], int]) -> None:
        parse_cache(cache)
        self.cache = cache
        self.split: Split | None = None
        """None before the first batches have decided it."""
        self.by_one = False
        """It was decided by a batch that was looked up alone; a lookahead decides by its window."""
        self._schema = schema
        self._record_bytes = list(record_bytes)
        self._free = free
        self._largest = np.zeros(len(schema.banks), np.int64)
        """Of each bank: rows of the largest batch that a split was made for."""
        self._auto: str | None = None
        """What "auto" came to, once that is decided."""

    @property
    def halves(self) -> list[int]:
        """For each bank: rows that may be on their way in, and as many on their way out."""
        return [rows // 2 for rows in self.split.staging_rows] if self.split else []

    def decide(self, needs: Sequence[Sequence[int]], distinct: Sequence[int], *, in_flight: int, number: int) -> Split:
        """A split that holds the batch `number`, and as many of those after it as can be had.

        **Arguments**

        - `needs`: for each batch from `number` on, the distinct rows of each bank.
        - `distinct`: the distinct rows of each bank in all of them.
        - `in_flight`: steps whose rows may be on their way.
        - `number`: of the first batch, for the error where not even this one fits.
        """
        each = np.array(needs, np.int64)
        whole = np.maximum(each.max(axis=0), self._largest)
        for largest in (whole, *(each[:n].max(axis=0) for n in range(len(each), 1, -1))):
            try:
                return self._split_for(largest, distinct, in_flight, number)
            except DoesNotFit:
                continue
        return self._split_for(each[0], distinct, in_flight, number)

    def check(self, needs: Sequence[int], *, in_flight: int, number: int) -> None:
        """Refuse the batch `number` if no split holds it; `needs`: its distinct rows of each bank."""
        largest = self._largest
        self._split_for(np.array(needs, np.int64), needs, in_flight, number)
        self._largest = largest

    def _split_for(self, largest: np.ndarray, distinct: Sequence[int], in_flight: int, number: int) -> Split:
        """A split that holds so many rows of each bank together."""
        slots, staging = split_cache(
            self._auto or self.cache,
            rows=self._rows,
            record_bytes=self._record_bytes,
            dims=[bank.dim for bank in self._schema.banks],
            distinct=distinct,
            largest=largest.tolist(),
            in_flight=in_flight,
            free=self._free,
            batch=f"batch {number}",
        )
        self._largest = np.maximum(self._largest, largest)
        return Split(slots, staging)

    def take(self, split: Split) -> None:
        """The cache is split so from now on."""
        self.split = split
        if self.cache == "auto":
            self._auto = f"{self._bytes(split.slots) + self._bytes(split.staging_rows)}B"

    def forget(self) -> None:
        """There is no cache: the next batches decide."""
        self.split, self.by_one = None, False

    @property
    def saved(self) -> dict[str, Any] | None:
        """How the cache is split, for a resumed run; None before it was."""
        if self.split is None:
            return None
        return {"cache": self.cache, "slots": self.split.slots, "staging_rows": self.split.staging_rows}

    def saved_split(self, saved: dict[str, Any] | None) -> Split | None:
        """The split that a run was saved with, where its cache was as large as this one."""
        if saved is None or saved["cache"] != self.cache:
            return None
        return Split(list(saved["slots"]), list(saved["staging_rows"]))

    def allows(self, saved: Any) -> bool:
        """Whether `saved` is a split that this cache could have: it may come from a file."""
        if saved is None or saved["cache"] != self.cache:
            return True
        kind, amount = parse_cache(self.cache)
        banks = self._rows
        counts = [*saved["slots"], *saved["staging_rows"]]
        if len(counts) != 2 * len(banks) or not all(type(n) is int and 0 < n < MAX_ROWS for n in counts):
            return False
        weights = self._record_bytes if kind == "bytes" else [1 for _ in banks]
        most = amount * sum(banks) if kind == "share" else amount
        most = max(1, most) + sum(weights[1:])  # a bank of which no batch had a row has one slot all the same
        taken = sum(n * weight for n, weight in zip(saved["slots"], weights, strict=True))
        if kind == "auto":  # another machine may have had more free: the split stays, and has to fit here
            taken, most = self._bytes(saved["slots"]) + self._bytes(saved["staging_rows"]), max(1, self._free())
        return all(n <= rows for n, rows in zip(saved["slots"], banks, strict=True)) and taken <= most

    @property
    def _rows(self) -> list[int]:
        return [sum(self._schema.tables[t].rows for t in bank.tables) for bank in self._schema.banks]

    def _bytes(self, counts: Sequence[int]) -> int:
        return sum(n * width for n, width in zip(counts, self._record_bytes, strict=True))
