"""Which stretches of buckets make a file each, and what is counted of their sessions: pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from skirl.dedup.order import begins, by_session, too_long

FEWEST, MOST = 16, 4096
"""Buckets."""
GROWS = 2
"""How many times as large as a file its rows mostly are in memory; where they are larger, buckets are read in several
goes."""


def buckets_for(total: int, unit: int) -> int:
    """How many buckets, a power of two, so that one mostly fits in memory.

    **Arguments**

    - `total`: bytes of the files that are read.
    - `unit`: bytes of rows that are sorted at once.
    """
    return min(MOST, max(FEWEST, 1 << (GROWS * total // unit).bit_length()))


@dataclass
class Counts:
    """What buckets hold: bytes and rows by partition and bucket, and their sessions."""

    bytes: dict[int, dict[int, int]] = field(default_factory=dict)
    """By partition and bucket."""
    rows: dict[int, dict[int, int]] = field(default_factory=dict)
    """Likewise."""
    sessions: int = 0
    cut_at_borders: int = 0
    cut_as_too_long: int = 0

    def hold(self, partition: int, bucket: int, rows: int, size: int) -> None:
        """Count a frame.

        **Arguments**

        - `partition`, `bucket`: of its rows.
        - `rows`: how many.
        - `size`: their bytes.
        """
        for of, more in ((self.bytes, size), (self.rows, rows)):
            own = of.setdefault(partition, {})
            own[bucket] = own.get(bucket, 0) + more

    def add(self, hashes: np.ndarray, times: np.ndarray, partitions: np.ndarray, gap: float | None) -> None:
        """Count the sessions of all rows of a bucket, and those that are cut.

        **Arguments**

        - `hashes`: uint64 [n, 2], of sessions or users.
        - `times`: float64 [n].
        - `partitions`: int64 [n], of each.
        - `gap`: seconds without a row after which a user begins a new session; None: hashes are those of sessions.
        """
        order = by_session(hashes, times)
        hashes, times, partitions = hashes[order], times[order], partitions[order]
        uncut = begins(hashes, times, gap, longest=len(times) + 1)
        borders = np.zeros(len(times), bool)
        borders[1:] = partitions[1:] != partitions[:-1]
        inside = np.add.reduceat((borders & ~uncut).astype(np.int64), np.flatnonzero(uncut))
        at_borders = uncut | borders
        new = _begins_within(at_borders)
        self.cut_at_borders += int((inside > 0).sum())
        self.cut_as_too_long += too_long(new, at_borders)
        self.sessions += int(new.sum())

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Counts":
        """Counts out of JSON, whose keys are texts.

        **Arguments**

        - `told`: the fields.
        """
        numbers = {
            name: {int(p): {int(b): n for b, n in of.items()} for p, of in told[name].items()}
            for name in ("bytes", "rows")
        }
        return cls(**{**told, **numbers})

    def merge(self, other: "Counts") -> None:
        """Count what another one has counted, of other buckets.

        **Arguments**

        - `other`: the other.
        """
        for partition, of in other.bytes.items():
            for bucket, size in of.items():
                self.hold(partition, bucket, other.rows[partition][bucket], size)
        self.sessions += other.sessions
        self.cut_at_borders += other.cut_at_borders
        self.cut_as_too_long += other.cut_as_too_long

    def planned(self, buckets: int, most: int) -> dict[str, Any]:
        """The units: stretches of buckets in a partition that make a file each, in order of time; and what was counted.

        **Arguments**

        - `buckets`: how many there are.
        - `most`: bytes of rows that are sorted at once.
        """
        units: list[tuple[int, int, int]] = []
        for partition in sorted(self.bytes):
            first, total = -1, 0
            for number, size in sorted(self.bytes[partition].items()):
                if first >= 0 and total + size > most:
                    units.append((partition, first, number))
                    first = -1
                first, total = (number, size) if first < 0 else (first, total + size)
            units.append((partition, first, buckets))
        rows = [sum(of for b, of in self.rows[p].items() if first <= b < end) for p, first, end in units]
        counts = {name: getattr(self, name) for name in ("sessions", "cut_at_borders", "cut_as_too_long")}
        return {"units": units, "unit_rows": rows, "most": most, **counts}


def _begins_within(begun: np.ndarray) -> np.ndarray:
    """Where sessions begin when those that are too long are cut: bool [n], like where they begin without."""
    of = np.cumsum(begun).astype(np.uint64)
    return begins(np.stack([of, of], axis=1), np.zeros(len(begun)), None)


def part_of(parts: Path, number: int, plan: Mapping[str, Any]) -> Path:
    """The file of a unit.

    **Arguments**

    - `parts`: the folder of files.
    - `number`: of the unit.
    - `plan`: with all units.
    """
    return parts / f"part-{number:0{max(5, len(str(len(plan['units']))))}}.parquet"
