"""Plans the units of a convert, ranges of buckets that make one file each, from counts of rows and bytes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from skirl.dedup.order import buckets_of
from skirl.dedup.spill import HELD

FEWEST, MOST = 16, 1 << 16
"""Bounds on the number of buckets."""
CELLS = 1 << 20
"""Most buckets in which to count rows, over all partitions: with many partitions, each has few buckets."""
FILL = 4
"""Fewest buckets per file, on average: with fewer, files would be half empty."""


def buckets_for(total: int, unit: int) -> int:
    """Return the number of buckets to use, a power of two.

    **Arguments**

    - `total`: bytes that all rows take in memory.
    - `unit`: bytes of rows to sort at once.

    >>> buckets_for(1000, 10)
    512
    """
    return min(MOST, max(FEWEST, 1 << (FILL * total // unit).bit_length()))


class Counts:
    """Counts of rows and bytes by partition and bucket."""

    def __init__(self) -> None:
        self._lines: dict[int, int] = {}
        """Index of each partition in `_cells`."""
        self._cells = np.zeros((1, MOST, 2), np.int64)
        """int64 [partitions or more, buckets, 2]: number of rows, and bytes of their values."""

    def hold(self, partitions: np.ndarray, highs: np.ndarray, rows: Any, sizes: np.ndarray) -> None:
        """Count rows.

        **Arguments**

        - `partitions`: int64 [n].
        - `highs`: uint64 [n], first halves of hashes.
        - `rows`: number of rows that each entry stands for: int64 [n], or one number for all.
        - `sizes`: int64 [n]: bytes of their values.
        """
        found, which = np.unique(partitions, return_inverse=True)
        lines = np.array([self._line(partition) for partition in found.tolist()], np.int64)
        buckets = self._cells.shape[1]
        at = lines[which] * buckets + buckets_of(highs[:, None], buckets)
        flat = self._cells.reshape(-1, 2)
        for column, values in enumerate((rows, sizes)):
            np.add.at(flat[:, column], at, values)

    def _line(self, partition: int) -> int:
        if partition not in self._lines:
            self._lines[partition] = len(self._lines)
            while len(self._lines) * self._cells.shape[1] > CELLS and self._cells.shape[1] > 1:
                self._cells = _coarser(self._cells, self._cells.shape[1] // 2)
            if len(self._lines) > len(self._cells):
                self._cells = np.concatenate([self._cells, np.zeros_like(self._cells)])
        return self._lines[partition]

    @property
    def bytes(self) -> int:
        """Bytes that all rows take in memory."""
        return int(_in_memory(self._cells).sum())

    def planned(self, unit: int) -> dict[str, Any]:
        """Return the plan: units, which are ranges of buckets of one partition that make one file each, in order of time.

        **Arguments**

        - `unit`: bytes of rows to sort at once.
        """
        buckets = min(buckets_for(self.bytes, unit), self._cells.shape[1])
        cells = _coarser(self._cells, buckets)
        units: list[tuple[int, int, int]] = []
        rows: list[int] = []
        held: list[int] = []
        for partition in sorted(self._lines):
            own = cells[self._lines[partition]]
            sizes, new = _in_memory(own), True
            for bucket in np.flatnonzero(own[:, 0]).tolist():
                if new or held[-1] + sizes[bucket] > unit:
                    units.append((partition, bucket, bucket))
                    rows.append(0)
                    held.append(0)
                    new = False
                units[-1] = (*units[-1][:2], bucket + 1)
                rows[-1] += int(own[bucket, 0])
                held[-1] += int(sizes[bucket])
        return {"units": units, "unit_rows": rows, "unit_bytes": held, "buckets": buckets, "most": unit}


def _coarser(cells: np.ndarray, buckets: int) -> np.ndarray:
    return cells.reshape(len(cells), buckets, -1, 2).sum(axis=2)


def _in_memory(cells: np.ndarray) -> np.ndarray:
    return HELD * cells[..., 0] + cells[..., 1]


def highs_of(first: int, end: int, buckets: int) -> tuple[int, int]:
    """Return the smallest and the largest first half of the hashes in buckets first .. end - 1.

    **Arguments**

    - `first`, `end`: numbers of buckets.
    - `buckets`: number of all buckets.

    >>> [hex(high) for high in highs_of(1, 2, 16)]
    ['0x1000000000000000', '0x1fffffffffffffff']
    """
    each = (1 << 64) // buckets
    return first * each, end * each - 1


def part_of(parts: Path, number: int, plan: Mapping[str, Any]) -> Path:
    """Return the path of a unit's file.

    **Arguments**

    - `parts`: folder of the files.
    - `number`: number of the unit.
    - `plan`: the plan with all units.
    """
    return parts / f"part-{number:0{max(5, len(str(len(plan['units']))))}}.parquet"
