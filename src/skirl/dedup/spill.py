"""Rows on disk by bucket: frames of Arrow, each of one stretch of time, which say what they hold."""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from skirl.data.files.errors import BadFile
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
        order = np.lexsort((partitions, buckets))
        buckets, partitions = buckets[order], partitions[order]
        new = np.flatnonzero((np.diff(buckets) != 0) | (np.diff(partitions) != 0)) + 1
        batch = table.combine_chunks().to_batches()[0]
        for low, high in zip([0, *new.tolist()], [*new.tolist(), len(order)]):
            self._write(int(buckets[low]), int(partitions[low]), batch.take(pa.array(order[low:high])))

    def _write(self, bucket: int, partition: int, rows: Any) -> None:
        path = path_of(self._folder, bucket)
        with writing(path):
            if bucket not in self._files:
                self._files[bucket] = open(path, "wb")  # noqa: SIM115 closed by `close`
            file, payload = self._files[bucket], rows.serialize()
            said = partition, rows.num_rows, rows.nbytes, payload.size
            file.write(_HEAD.pack(_MAGIC, *said, _sum_of(said, payload)))
            file.write(payload)
            file.write(bytes(-payload.size % _ALIGNED))
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
