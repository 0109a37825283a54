"""Rows on disk by bucket: frames of packed rows, each of one stretch of time, which say what they hold."""

import os
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from skirl.data.files.errors import BadFile
from skirl.dedup.packed import Packing, columns_without
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

KEYS = ("~high", "~low", "~time")
"""Columns that rows are ordered by; no file has them."""
LARGEST = 1 << 20
"""Bytes of the rows of a frame, unless one row has more."""
TOGETHER = 8 << 20
"""Bytes of rows that are packed at once, likewise."""
_HEAD = struct.Struct("<8sqqqII24x")
_MAGIC = b"skirlrow"
_ALIGNED = 64
_KEY = 32
"""Bytes of what a row is ordered by, and of how many bytes it has."""


class Frame(NamedTuple):
    """A stretch of a spill file: what its rows are ordered by, and the rows."""

    partition: int
    rows: int
    length: int
    """Bytes of the rows."""
    offset: int
    sum_of_keys: int
    sum_of_rows: int

    @property
    def bytes(self) -> int:
        """Of the values in memory, those that rows are ordered by included: what files are planned by."""
        return self.length + 24 * self.rows


class Framed(NamedTuple):
    """A frame that is to be written."""

    bucket: int
    frame: Frame
    keys: bytes
    """What its rows are ordered by, see `keys_in`."""
    pieces: tuple[Any, ...]
    """All of it as it lies in a file."""


def packing_of(schema: pa.Schema) -> Packing:
    """How rows lie in frames: without what they are ordered by.

    **Arguments**

    - `schema`: of the rows.
    """
    return Packing(columns_without(schema, KEYS))


def framed(table: Any, buckets: np.ndarray, partitions: np.ndarray) -> Iterator[Framed]:
    """Rows by bucket and partition, those of one in order.

    **Arguments**

    - `table`: the rows, with what they are ordered by.
    - `buckets`, `partitions`: int64, of each.
    """
    [batch] = table.combine_chunks().to_batches()
    packing, rows = packing_of(batch.schema), batch.drop_columns(KEYS)
    order = np.lexsort((partitions, buckets))
    buckets, partitions, sizes = buckets[order], partitions[order], packing.sizes_of(rows)[order]
    said = [batch.column(name).to_numpy()[order] for name in KEYS]
    said.append(sizes)
    new = np.flatnonzero((np.diff(buckets) != 0) | (np.diff(partitions) != 0)) + 1
    ends = np.cumsum(sizes)
    for first, end in _cut(ends, 0, len(order), TOGETHER):
        packed = packing.packed(rows, order[first:end], sizes[first:end])
        before = int(ends[first] - sizes[first])
        inside = new[np.searchsorted(new, first, "right") : np.searchsorted(new, end)].tolist()
        for begin, stop in pairwise([first, *inside, end]):
            for low, high in _cut(ends, begin, stop, LARGEST):
                own = packed[ends[low] - sizes[low] - before : ends[high - 1] - before]
                keys = b"".join(of[low:high].tobytes() for of in said)
                yield _framed(int(buckets[low]), int(partitions[low]), high - low, keys, own)


def _cut(ends: np.ndarray, low: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Rows in stretches of so many bytes at most, unless one row has more. ends: bytes up to each row and with it."""
    while low < end:
        before = ends[low - 1] if low else 0
        high = (
            end if ends[end - 1] - before <= most else max(low + 1, int(np.searchsorted(ends, before + most, "right")))
        )
        yield low, high
        low = high


def _framed(bucket: int, partition: int, rows: int, keys: bytes, packed: np.ndarray) -> Framed:
    frame = Frame(
        partition, rows, len(packed), 0, _sum_of_keys(partition, rows, len(packed), keys), zlib.crc32(packed.data)
    )
    head = _HEAD.pack(_MAGIC, partition, rows, len(packed), frame.sum_of_keys, frame.sum_of_rows)
    return Framed(bucket, frame, keys, (head, keys, packed, bytes(-len(packed) % _ALIGNED)))


def _sum_of_keys(partition: int, rows: int, length: int, keys: Any) -> int:
    """Of what a frame says of itself, and of what its rows are ordered by."""
    return zlib.crc32(keys, zlib.crc32(struct.pack("<3q", partition, rows, length)))


def keys_in(raw: Any, rows: int) -> list[np.ndarray]:
    """Hashes of rows, their first half and their second, times, and how many bytes each row has.

    **Arguments**

    - `raw`: the keys of a frame.
    - `rows`: how many.
    """
    kinds = (np.uint64, np.uint64, np.float64, np.int64)
    return [np.frombuffer(raw, kind, rows, 8 * k * rows) for k, kind in enumerate(kinds)]


class Spill:
    """Writes rows to a file a bucket; none stays open, for there may be more of them than a process may have.

    **Arguments**

    - `folder`: where to; it is there.
    - `buckets`: how many files.
    """

    def __init__(self, folder: Path, buckets: int) -> None:
        self._folder, self._buckets = folder, buckets
        self.sizes = [0] * buckets
        """Bytes of each file."""

    def add(self, table: Any, buckets: np.ndarray, partitions: np.ndarray) -> list[tuple[int, Frame]]:
        """Write rows, each to its bucket; those of a bucket and partition stay in order. The frames, and their buckets.

        **Arguments**

        - `table`: the rows.
        - `buckets`, `partitions`: int64, of each.
        """
        written = []
        for each in framed(table, buckets, partitions):
            path = path_of(self._folder, each.bucket)
            with writing(path), path.open("ab") as file:
                for piece in each.pieces:
                    file.write(piece)
                self.sizes[each.bucket] = file.tell()
            written.append((each.bucket, each.frame))
        return written

    def close(self) -> None:
        """See to it that all files survive a crash of the machine."""
        for bucket, size in enumerate(self.sizes):
            path = path_of(self._folder, bucket)
            if size:
                with writing(path), path.open("rb+") as file:
                    to_disk(file)


class Bucket:
    """Reads a bucket's file; a `BadFile` where it is not as it was written.

    **Arguments**

    - `folder`: where it is.
    - `bucket`: which.
    - `size`: its bytes, when it was written.
    - `then`: what to do where it is damaged.
    """

    def __init__(self, folder: Path, bucket: int, size: int, then: str) -> None:
        self._path, self._then = str(path_of(folder, bucket)), then
        self._file: BinaryIO | None = None
        self.frames: list[Frame] = []
        if not size:
            return
        try:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 closed by `close`
        except OSError as error:
            raise self._damaged(f"cannot be read ({error.strerror})") from None
        has = os.fstat(self._file.fileno()).st_size
        if has != size:
            self.close()
            raise self._damaged(f"has {has:,} bytes, and had {size:,}")
        self.frames = list(self._headers(size))

    def _headers(self, size: int) -> Iterator[Frame]:
        assert self._file is not None
        at = 0
        while at < size:
            raw = os.pread(self._file.fileno(), _HEAD.size, at)
            magic, partition, rows, length, *sums = (
                _HEAD.unpack(raw) if len(raw) == _HEAD.size else (b"", 0, 0, 0, 0, 0)
            )
            right = magic == _MAGIC and min(rows, length) >= 0
            frame = Frame(partition, rows, length, at + _HEAD.size, *sums)
            at = frame.offset + _KEY * rows + length + -length % _ALIGNED if right else size + 1
            if at > size:
                self.close()
                raise self._damaged(f"is damaged at byte {frame.offset - _HEAD.size:,}")
            yield frame

    def keys(self, frame: Frame) -> list[np.ndarray]:
        """What a frame's rows are ordered by, and their bytes: see `keys_in`."""
        raw = np.empty(_KEY * frame.rows, np.uint8)
        self._read(raw, frame.offset)
        if _sum_of_keys(frame.partition, frame.rows, frame.length, raw) != frame.sum_of_keys:
            raise self._damaged(f"is damaged behind byte {frame.offset:,}")
        return keys_in(raw, frame.rows)

    def read(self, frame: Frame, out: np.ndarray) -> None:
        """Read a frame's rows, uint8.

        **Arguments**

        - `frame`: the frame.
        - `out`: where to.
        """
        self._read(out, frame.offset + _KEY * frame.rows)
        if zlib.crc32(out.data) != frame.sum_of_rows:
            raise self._damaged(f"is damaged behind byte {frame.offset:,}")

    def _read(self, out: np.ndarray, offset: int) -> None:
        assert self._file is not None
        view, at = out.data, 0
        while at < len(view):  # a call reads 2 GiB at most
            got = os.preadv(self._file.fileno(), [view[at:]], offset + at)
            if not got:
                raise self._damaged(f"ends behind byte {offset + at:,}")
            at += got

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()

    def _damaged(self, found: str) -> BadFile:
        return BadFile(self._path, found, self._then)


def path_of(folder: Path, bucket: int) -> Path:
    """The file of a bucket."""
    return folder / f"bucket-{bucket:04}"
