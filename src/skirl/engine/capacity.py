"""The cache of one engine: how large it is, and how it is split between the banks, record widths of different dims."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skirl.core.keys import MAX_ROWS
from skirl.core.tables import Schema
from skirl.engine.cache_split import CacheSize, parse_cache, room_of, split_cache
from skirl.engine.too_small import DoesNotFit, Room, too_small


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

    **Arguments**

    - `cache`: how large it is, as one trainer of all has it: a share is of the rows that it owns.
    - `schema`: the tables.
    - `record_bytes`: of a row of each bank.
    - `free`: gives the bytes that are free where the cache will be.
    - `sites`: trainers that share the rows.
    - `near`: those of them that share the memory: "auto" takes its part of what is free.

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
        self.split: Split | None = None
        """None before the first batches have decided it."""
        self.by_one = False
        """It was decided by a batch that was looked up alone; a lookahead decides by its window."""
        self._schema = schema
        self._record_bytes = list(record_bytes)
        self._free = lambda: free() // near
        self._largest = np.zeros(len(schema.banks), np.int64)
        """Of each bank: rows of the largest batch that a split was made for."""
        self._auto: str | None = None
        """What "auto" came to, once that is decided."""

    @property
    def halves(self) -> list[int]:
        """For each bank: rows that may be on their way in, and as many on their way out."""
        return [rows // 2 for rows in self.split.staging_rows] if self.split else []

    def sizes(self, record_bytes: Sequence[int], staging_bytes: Sequence[int]) -> list[Size]:
        """What each bank takes, once a split is decided.

        **Arguments**

        - `record_bytes`: of a row of each bank.
        - `staging_bytes`: that each bank has allocated for rows on their way.
        """
        tables, split = self._schema.tables, self.split
        if split is None:
            return []
        return [
            Size(bank.dim, sum(tables[t].rows for t in bank.tables), slots, staging, one, allocated)
            for bank, slots, staging, one, allocated in zip(
                self._schema.banks, split.slots, split.staging_rows, record_bytes, staging_bytes, strict=True
            )
        ]

    def decide(
        self, needs: Sequence[Sequence[int]], distinct: Sequence[int], *, in_flight: int, number: int | None
    ) -> Split:
        """A split that holds the batch `number`, and as many of those after it as can be had.

        **Arguments**

        - `needs`: for each batch from `number` on, the distinct rows of each bank.
        - `distinct`: the distinct rows of each bank in all of them.
        - `in_flight`: steps whose rows may be on their way.
        - `number`: of the first batch, for the error where not even this one fits; None: it has none.
        """
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
        """Refuse the batch `number` if no split holds it; `needs`: its distinct rows of each bank."""
        largest = self._largest
        self._split_for(np.array(needs, np.int64), needs, in_flight, number)
        self._largest = largest

    def check_run(self, needs: Sequence[Sequence[int]], *, in_flight: int) -> None:
        """Refuse a run that is known as a whole and has a batch for which no split is large enough.

        `needs`: for each of its batches, the distinct rows of each bank.
        """
        if self.cache == "auto" or not len(needs):
            return
        room, _ = self._room(needs[0], in_flight)
        # A bank that has no row in the batches that decide gets a slot all the same, beyond the budget.
        most = room.budget + len(self._rows) - 1 if room.staging is None else int(parse_cache(self.cache)[1])
        large = np.flatnonzero(room.needs(needs) > most)
        if len(large):
            raise self.refusal(needs, in_flight=in_flight, number=0, at=int(large[0]), whole=True)

    def refusal(
        self, needs: Sequence[Sequence[int]], *, in_flight: int, number: int | None, at: int = 0, whole: bool = False
    ) -> DoesNotFit:
        """The error for a batch that no split holds.

        **Arguments**

        - `needs`: for each batch that is known, the distinct rows of each bank.
        - `in_flight`: steps whose rows may be on their way.
        - `number`: of the first of these batches; None: it has none.
        - `at`: which of them does not fit.
        - `whole`: whether these are all batches of the run.
        """
        room, _ = self._room(needs[at], in_flight)
        room = replace(room, cache=self.cache)  # and not the bytes that "auto" came to
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

    def _split_for(self, largest: np.ndarray, distinct: Sequence[int], in_flight: int, number: int | None) -> Split:
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
            batch=_named(number),
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


def _named(number: int | None) -> str:
    return "this batch" if number is None else f"batch {number}"
