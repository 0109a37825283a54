"""How many rows of each bank the cache holds, for one size of all, and what to say where a batch does not fit."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np

from skirl.core.keys import MAX_ROWS, ROW_BITS
from skirl.tools.machine import free_bytes
from skirl.tools.units import parse_bytes

CacheSize = int | str
_HOW = "set it to a number of rows, a share like '10%', a size like '4GiB' or 'auto'"
AUTO = 0.5
"""Share of the free memory when training begins. The rest is for the model, its activations and what comes later."""


class DoesNotFit(ValueError):
    """A batch needs more rows at the same time than the whole cache holds."""

    def __init__(self, found: str, enough: int, in_bytes: bool) -> None:
        size = f"{enough} bytes or more ('{enough}B')" if in_bytes else f"{enough} or more"
        super().__init__(
            f"{found}: set cache to {size}, or use smaller batches; `skirl size` says what a whole run needs"
        )
        self.found, self.enough, self.in_bytes = found, enough, in_bytes


def parse_cache(cache: CacheSize) -> tuple[str, float]:
    """Parse a cache size: ("rows", n), ("share", of all rows), ("bytes", n) or ("auto", share of the free memory).

    >>> parse_cache(1000), parse_cache("10%"), parse_cache("1MiB"), parse_cache("auto")
    (('rows', 1000), ('share', 0.1), ('bytes', 1048576), ('auto', 0.5))
    """
    if not isinstance(cache, str):
        if isinstance(cache, bool) or not isinstance(cache, Integral):
            raise TypeError(f"cache is a {type(cache).__name__}: {_HOW}")
        if not 1 <= cache <= MAX_ROWS:
            raise ValueError(f"cache is {cache} rows: set it to 1 or more, up to 2**{ROW_BITS}")
        return "rows", int(cache)
    if cache == "auto":
        return "auto", AUTO
    share = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", cache)
    if share:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"cache is {cache!r}: set it to a share above 0% and up to 100%")
        return "share", float(share[1]) / 100
    try:
        size = parse_bytes(cache)
    except ValueError:
        raise ValueError(f"cache is {cache!r}: {_HOW}") from None
    if size < 1:
        raise ValueError(f"cache is {cache!r}: set it to 1 byte or more")
    return "bytes", size


class CacheSplit(NamedTuple):
    """Slots of each bank, and rows that may be on their way in addition."""

    slots: list[int]
    staging_rows: list[int]


@dataclass
class Capacity:
    """The size of an engine's cache, for banks of rows, in rows or bytes. Its split follows the demand of a run's first
    batches, and changes if a later batch does not fit: it depends on the data and, with "auto", on the memory that is
    free at first."""

    cache: CacheSize
    rows: Sequence[int]
    record_bytes: Sequence[int]
    free: Callable[[], int] = free_bytes
    sites: int = 1
    """Trainers that own rows: a share is one of those that each owns."""
    split: CacheSplit | None = None
    """None until the first batches have decided it."""
    by_one: bool = False
    """True if a batch that was looked up alone decided the split. A lookahead decides by its window instead."""

    def __post_init__(self) -> None:
        self._kind, self._amount = parse_cache(self.cache)
        self._largest = np.zeros(len(self.rows), np.int64)
        """Rows of each bank in the largest batch that a split was made for."""

    @property
    def in_bytes(self) -> bool:
        return self._kind in ("bytes", "auto")

    @property
    def weights(self) -> Sequence[int]:
        return self.record_bytes if self.in_bytes else [1] * len(self.rows)

    @property
    def halves(self) -> list[int]:
        """For each bank: rows that may be on their way in; as many more may be on their way out."""
        return [rows // 2 for rows in self.split.staging_rows] if self.split else []

    def needs(self, batches: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """Return the units that each batch needs, given its distinct rows of each bank."""
        return np.minimum(np.array(batches, np.int64).reshape(-1, len(self.rows)), self.rows) @ np.array(self.weights)

    def enough(self, need: int) -> int:
        """Return a cache size that surely holds batches with this need. In bytes, at most half of it is staging."""
        return 2 * (need + sum(self.weights)) if self.in_bytes else need

    def _bytes_of(self, counts: Sequence[int]) -> int:
        return sum(n * width for n, width in zip(counts, self.record_bytes, strict=True))

    def _budget(self, largest: Sequence[int], in_flight: int) -> tuple[int, list[int]]:
        """Return the units for rows in slots, and each bank's staging rows, for batches of at most `largest` rows."""
        amount, staging = self._amount, [max(1, in_flight * n) for n in largest]
        if not self.in_bytes:
            rows = amount if self._kind == "rows" else amount * sum(self.rows) / self.sites
            return max(1, int(rows)), staging
        # Staging is part of the bytes, but at most half of them, so that a small cache still holds rows.
        amount, wish = int(amount * self.free() if self._kind == "auto" else amount), self._bytes_of(staging)
        if 2 * wish > amount:
            staging = [max(1, int(n * amount / 2 / wish)) for n in staging]
        return amount - self._bytes_of(staging), staging

    def divide(self, distinct: Sequence[int], largest: Sequence[int], in_flight: int) -> CacheSplit:
        """Split the cache among banks: each gets what one batch needs and at least one slot, the rest goes by demand,
        `distinct` rows in the first window. `largest`: the rows of one batch."""
        budget, staging = self._budget(largest, in_flight)
        floors = [min(n, most) for n, most in zip(self.rows, largest, strict=True)]
        if int(self.needs([largest])[0]) > budget:
            raise self.refusal([largest], in_flight=in_flight)
        # A bank that the first window does not use will be used later. Count it as one row, so that it gets more than one.
        demand = [max(1, n) for n in distinct]
        return CacheSplit([max(1, slots) for slots in _share(budget, self.weights, floors, self.rows, demand)], staging)

    def decide(
        self, needs: Sequence[Sequence[int]], distinct: Sequence[int], *, in_flight: int, number: int = 0
    ) -> CacheSplit:
        """Return a split that holds the first batch, number `number`, and as many of the batches after it as possible."""
        each = np.array(needs, np.int64)
        whole = np.maximum(each.max(axis=0), self._largest)
        for largest in (whole, *(each[:n].max(axis=0) for n in range(len(each), 0, -1))):
            with suppress(DoesNotFit):
                split = self.divide(distinct, largest.tolist(), in_flight)
                self._largest = np.maximum(self._largest, largest)
                return split
        raise self.refusal(needs, in_flight=in_flight, number=number)

    def refusal(self, batches: Sequence[Sequence[int]], *, in_flight: int, number: int = 0) -> DoesNotFit:
        """Return the error for batch `number`, which no split holds, the first of `batches`. It asks for what the
        largest of them needs, so that the next is not refused too."""
        (budget, staging), needs = self._budget(batches[0], in_flight), self.needs(batches)
        most = int(needs.argmax())
        also = f", and batch {number + most} needs {needs[most]:,}" if needs[most] > needs[0] else ""
        room = f"is {budget:,} rows"
        if self.in_bytes:
            room = f"has {max(0, budget):,} bytes for rows and {self._bytes_of(staging):,} for rows on their way"
        found = f"cache {self.cache!r} {room}, batch {number} needs {needs[0]:,}{also}"
        return DoesNotFit(found, self.enough(int(needs[most])), self.in_bytes)

    def take(self, split: CacheSplit) -> None:
        self.split = split
        if self.cache == "auto":
            self._kind, self._amount = "bytes", sum(map(self._bytes_of, split))  # for all splits to come

    def forget(self) -> None:
        self.split, self.by_one = None, False


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
