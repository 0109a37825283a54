"""The size of one engine's cache, and its split between the banks, which have records of different widths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.core.tables import Schema
from skirl.engine.cache_split import CacheSize, parse_cache, room_of, split_cache
from skirl.engine.too_small import DoesNotFit, Room, too_small


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
    skirl.engine.too_small.DoesNotFit: cache 10 is 10 rows, batch 2 needs 11 (6 of dim 8): set cache to 11 or more, or use smaller batches; `skirl size` says what a whole run needs
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
