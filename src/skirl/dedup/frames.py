"""Frames of spilled rows: consecutive rows of a sorted load, and their records in an index."""

import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from skirl.dedup.order import buckets_of
from skirl.dedup.packed import Packing, columns_without

KEYS = ("~high", "~low", "~time")
"""Columns of the sort keys of rows; no file has them."""
TOGETHER = 8 << 20
"""Bytes of rows to pack at once, unless one row has more."""
KEY_BYTES = 32
"""Bytes of a row's sort key together with its size."""
_PLACE = np.dtype([("high", "<u8"), ("low", "<u8"), ("time", "<f8")])
RECORD = np.dtype(
    [
        ("partition", "<i8"), ("rows", "<i8"), ("length", "<i8"), ("row", "<i8"), ("offset", "<i8"), ("first", _PLACE),
        ("last", _PLACE), ("sum_of_keys", "<u4"), ("sum_of_rows", "<u4"),
    ]
)  # fmt: skip
"""A frame's record in the index: its partition, its number of rows and bytes, the numbers of rows and bytes before it, the
sort keys of its first and last row, and checksums."""
_AS_BYTES = struct.Struct("<5q6Q2I")


class Ordered(NamedTuple):
    """Rows ordered by partition, then hash, then time, then position in the input."""

    rows: Any
    """The rows as a batch in input order, without sort keys; None if there are only sort keys."""
    order: np.ndarray
    partitions: np.ndarray
    high: np.ndarray
    low: np.ndarray
    times: np.ndarray
    sizes: np.ndarray
    """int64: packed bytes of each row."""

    def alone(self) -> "Ordered":
        """Return only the sort keys of the same rows, ordered as a single partition."""
        order = np.lexsort((self.times, self.low, self.high))
        none = np.zeros(len(order), np.int64)
        return Ordered(None, order, none, self.high[order], self.low[order], self.times[order], none)


class Frame(NamedTuple):
    """A frame to write."""

    bucket: int
    partition: int
    keys: np.ndarray
    """uint64 [n, 4]: sort keys of its rows, see `keys_in`."""
    packed: np.ndarray
    """uint8: the packed rows."""

    def record(self, row: int, offset: int) -> bytes:
        """Return the frame's record for the index.

        **Arguments**

        - `row`: number of rows before it.
        - `offset`: number of bytes of rows before it.
        """
        rows, length, keys = len(self.keys), len(self.packed), self.keys
        sums = sum_of_keys(self.partition, rows, length, keys.data), zlib.crc32(self.packed.data)
        ends = *keys[0, :3].tolist(), *keys[-1, :3].tolist()
        return _AS_BYTES.pack(self.partition, rows, length, row, offset, *ends, *sums)


def packing_of(schema: pa.Schema) -> Packing:
    """Return the packing of rows in frames, which leaves out sort keys.

    **Arguments**

    - `schema`: schema of the rows.
    """
    return Packing(columns_without(schema, KEYS))


def ordered(table: Any, partitions: np.ndarray) -> Ordered:
    """Sort rows.

    **Arguments**

    - `table`: the rows, with their sort keys.
    - `partitions`: int64, the partition of each row.
    """
    [batch] = table.combine_chunks().to_batches()
    rows = batch.drop_columns(KEYS)
    high, low, times = (batch.column(name).to_numpy() for name in KEYS)
    order = np.lexsort((times, low, high, partitions))
    sizes = packing_of(rows.schema).sizes_of(rows)
    return Ordered(rows, order, *(of[order] for of in (partitions, high, low, times, sizes)))


def framed(rows: Ordered, most: int, buckets: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray, list[Frame]]]:
    """Yield runs of consecutive frames: their sort keys, their packed rows, and the frames, each of one partition.

    **Arguments**

    - `rows`: the rows in order.
    - `most`: most bytes of a frame, unless one row has more.
    - `buckets`: number of buckets; a frame belongs to one.
    """
    partitions, own = rows.partitions, buckets_of(rows.high[:, None], buckets)
    new = np.flatnonzero((np.diff(own) != 0) | (np.diff(partitions) != 0)) + 1
    ends, packed_ends = np.cumsum(rows.sizes + KEY_BYTES), np.cumsum(rows.sizes)
    keys = np.stack([rows.high, rows.low, rows.times.view(np.uint64), rows.sizes.view(np.uint64)], axis=1)
    packing = None if rows.rows is None else Packing(rows.rows.schema)
    packed = np.empty(0, np.uint8)
    for first, end in _cut(ends, 0, len(ends), TOGETHER):
        if packing is not None:
            packed = packing.packed(rows.rows, rows.order[first:end], rows.sizes[first:end])
        before = int(packed_ends[first] - rows.sizes[first])
        inside = new[np.searchsorted(new, first, "right") : np.searchsorted(new, end)].tolist()
        cuts = [cut for begin, stop in pairwise([first, *inside, end]) for cut in _cut(ends, begin, stop, most)]
        starts = (packed_ends - rows.sizes)[[low for low, _ in cuts]] - before
        stops = packed_ends[[high - 1 for _, high in cuts]] - before
        yield (
            keys[first:end],
            packed,
            [
                Frame(int(own[low]), int(partitions[low]), keys[low:high], packed[begin:stop])
                for (low, high), begin, stop in zip(cuts, starts.tolist(), stops.tolist(), strict=True)
            ],
        )


def _cut(ends: np.ndarray, low: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut rows low .. end - 1 into ranges of at most `most` bytes, unless one row has more.

    ends: bytes up to the end of each row.
    """
    while low < end:
        before = ends[low - 1] if low else 0
        high = (
            end if ends[end - 1] - before <= most else max(low + 1, int(np.searchsorted(ends, before + most, "right")))
        )
        yield low, high
        low = high


def sum_of_keys(partition: int, rows: int, length: int, keys: Any) -> int:
    """Return the checksum of a frame's sort keys and of its partition, number of rows and length."""
    return zlib.crc32(keys, zlib.crc32(struct.pack("<3q", partition, rows, length)))


def keys_in(raw: Any) -> np.ndarray:
    """Return uint64 [n, 4]: for each row the two halves of its hash, the bits of its time, and its packed size in bytes.

    **Arguments**

    - `raw`: the sort keys of a frame, as bytes.
    """
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)
