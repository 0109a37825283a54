"""Rows on disk by bucket: frames of Arrow, each of one stretch of time, which say what they hold."""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc as ipc

from skirl.data.files.columns import is_list, is_text
from skirl.data.files.errors import BadFile
from skirl.dedup.take import taken
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

_HEAD = struct.Struct("<8sqqqqQ16x")
_MAGIC = b"skirlrow"
_ALIGNED = 64


class Frame(NamedTuple):
    """A stretch of a spill file."""

    partition: int
    rows: int
    bytes: int
    """Of the rows in memory."""
    offset: int
    length: int
    sum: int


def divided(table: Any, buckets: np.ndarray, partitions: np.ndarray) -> Iterator[tuple[int, int, Any]]:
    """Rows by bucket and partition, those of one in order: both, and a batch.

    **Arguments**

    - `table`: the rows.
    - `buckets`, `partitions`: int64, of each.
    """
    order = np.lexsort((partitions, buckets))
    buckets, partitions = buckets[order], partitions[order]
    new = np.flatnonzero((np.diff(buckets) != 0) | (np.diff(partitions) != 0)) + 1
    batch = table.combine_chunks().to_batches()[0]
    for low, high in zip([0, *new.tolist()], [*new.tolist(), len(order)]):
        yield int(buckets[low]), int(partitions[low]), taken(batch, order[low:high])


def framed(partition: int, rows: Any) -> tuple[bytes, Any, bytes]:
    """A frame as it lies in a file: what it says of itself, its rows, and what fills it up.

    **Arguments**

    - `partition`: the stretch of time that all rows are in.
    - `rows`: a batch.
    """
    payload = rows.serialize()
    said = partition, rows.num_rows, size_of(rows), payload.size
    return _HEAD.pack(_MAGIC, *said, _sum_of(said, payload)), payload, bytes(-payload.size % _ALIGNED)


def size_of(rows: Any) -> int:
    """Bytes of the values of rows.

    **Arguments**

    - `rows`: a batch.
    """
    return sum(map(bytes_of, rows.columns))


def bytes_of(column: Any) -> int:
    """Bytes of a column's values, however they are held: the sum over pieces is that of the whole, so what is planned by it
    depends on rows alone.

    **Arguments**

    - `column`: an Arrow array.

    >>> lists = pa.array([[1, 2], None, [], [3]])
    >>> bytes_of(lists), bytes_of(lists[:2]) + bytes_of(lists[2:]), bytes_of(pa.array(["ab", None]))
    (40, 40, 10)
    """
    kind, rows = column.type, len(column)
    with suppress(ValueError):
        return rows * max(1, kind.bit_width // 8)
    if is_list(kind):
        return 4 * rows + bytes_of(column.flatten())
    if pa.types.is_struct(kind):
        return sum(map(bytes_of, column.flatten()))
    if is_text(kind):
        return 4 * rows + (pc.call_function("sum", [pc.call_function("binary_length", [column])]).as_py() or 0)
    return 8 * rows


class Spill:
    """Writes rows to a file a bucket.

    **Arguments**

    - `folder`: where to; it is there.
    - `buckets`: how many files.
    """

    def __init__(self, folder: Path, buckets: int) -> None:
        self._folder, self._buckets = folder, buckets
        self._files: dict[int, BinaryIO] = {}
        self.sizes = [0] * buckets
        """Bytes of each file."""

    def add(self, table: Any, buckets: np.ndarray, partitions: np.ndarray) -> None:
        """Write rows, each to its bucket; those of a bucket and partition stay in order.

        **Arguments**

        - `table`: the rows.
        - `buckets`, `partitions`: int64, of each.
        """
        for bucket, partition, rows in divided(table, buckets, partitions):
            path = path_of(self._folder, bucket)
            with writing(path):
                if bucket not in self._files:
                    self._files[bucket] = open(path, "wb")  # noqa: SIM115 closed by `close`
                file = self._files[bucket]
                for piece in framed(partition, rows):
                    file.write(piece)
                file.flush()
                self.sizes[bucket] = file.tell()

    def close(self, *, whole: bool = True) -> None:
        """Close all files. whole: they are to survive a crash of the machine."""
        while self._files:  # what fails leaves the others to the next call
            bucket, file = self._files.popitem()
            with writing(path_of(self._folder, bucket)), file:
                if whole:
                    to_disk(file)


class Bucket:
    """Reads a bucket's file; a `BadFile` where it is not as it was written.

    **Arguments**

    - `folder`: where it is.
    - `bucket`: which.
    - `size`: its bytes, when it was written.
    - `schema`: of the rows.
    - `then`: what to do where it is damaged.
    """

    def __init__(self, folder: Path, bucket: int, size: int, schema: pa.Schema, then: str) -> None:
        self._path, self._schema, self._then = str(path_of(folder, bucket)), schema, then
        self._file: BinaryIO | None = None
        self._checked: set[int] = set()
        self.frames: list[Frame] = []
        if not size:
            return
        try:
            self._file = open(self._path, "rb")  # noqa: SIM115 closed by `close`
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
            magic, partition, rows, held, length, total = (
                _HEAD.unpack(raw) if len(raw) == _HEAD.size else (b"", 0, 0, 0, -1, 0)
            )
            end = at + _HEAD.size + length + -length % _ALIGNED if magic == _MAGIC and length >= 0 else size + 1
            if end > size:
                self.close()
                raise self._damaged(f"is damaged at byte {at:,}")
            yield Frame(partition, rows, held, at + _HEAD.size, length, total)
            at = end

    def read(self, frame: Frame) -> Any:
        """The rows of a frame, where they lie: they take memory as long as they are held, and only what is looked at."""
        assert self._file is not None
        begin = frame.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        span = frame.offset - begin + frame.length
        mapped = mmap.mmap(self._file.fileno(), span, offset=begin, access=mmap.ACCESS_READ)
        payload = pa.py_buffer(mapped).slice(frame.offset - begin)
        if frame.offset not in self._checked and _sum_of((*frame[:3], frame.length), payload) != frame.sum:
            raise self._damaged(f"is damaged behind byte {frame.offset:,}")
        self._checked.add(frame.offset)
        return ipc.read_record_batch(payload, self._schema)

    def close(self) -> None:
        """Let the file go."""
        if self._file is not None:
            self._file.close()

    def _damaged(self, found: str) -> BadFile:
        return BadFile(self._path, found, self._then)


def _sum_of(said: tuple[int, ...], payload: Any) -> int:
    """Of what a frame says of itself, and of its rows."""
    return zlib.crc32(payload, zlib.crc32(struct.pack("<4q", *said)))


def path_of(folder: Path, bucket: int) -> Path:
    """The file of a bucket."""
    return folder / f"bucket-{bucket:04}"
