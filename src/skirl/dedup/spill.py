"""Rows spilled to disk: consecutive frames, and an index with the first and last sort key of each."""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from skirl.data.files.errors import BadFile
from skirl.dedup.frames import KEY_BYTES, RECORD, Frame, Ordered, framed, keys_in, sum_of_keys
from skirl.tools.os_errors import writing
from skirl.tools.sealed_json import to_disk

HELD = 112
"""Bytes of memory that sorting takes per row, in addition to the row's values."""
ALL = (0, (1 << 64) - 1)
"""The range of the first halves of all hashes."""
ROWS, SESSIONS = "rows", "sessions"
"""Names of spills: one of rows, and one of sort keys alone."""
_AT_ONCE = 1 << 14
"""Records to read at once."""


class Spill:
    """Writes frames to three files: one of rows, one of sort keys, and an index of frames.

    **Arguments**

    - `folder`: an existing folder to write to.
    - `name`: name of the files.
    """

    def __init__(self, folder: Path, name: str = ROWS) -> None:
        self._path = path_of(folder, name)
        self._bytes = self._rows = self._frames = self._sum = 0
        with writing(self._path):
            self._files: list[BinaryIO] = [path.open("wb") for path in _paths(self._path)]

    def add(self, rows: Ordered, most: int) -> None:
        """Write rows.

        **Arguments**

        - `rows`: the rows in order.
        - `most`: most bytes of a frame, unless one row has more.
        """
        with writing(self._path):
            for keys, packed, frames in framed(rows, most):
                for frame in frames:
                    self._note(frame.record(self._rows, self._bytes), len(frame.keys), len(frame.packed))
                self._files[1].write(keys.data)
                self._files[0].write(packed.data)

    def put(self, partition: int, keys: Any) -> None:
        """Write a frame that has only sort keys.

        **Arguments**

        - `partition`: partition of the rows.
        - `keys`: the sort keys as bytes, see `keys_in`.
        """
        frame = Frame(0, partition, keys_in(keys), np.empty(0, np.uint8))
        with writing(self._path):
            self._note(frame.record(self._rows, self._bytes), len(frame.keys), 0)
            self._files[1].write(keys)

    def put_whole(self, frame: Any) -> None:
        """Write a frame that comes with its record.

        **Arguments**

        - `frame`: the record, followed by sort keys and rows.
        """
        record, values = np.frombuffer(frame, RECORD, 1).copy(), memoryview(frame)[RECORD.itemsize :]
        record["row"], record["offset"] = self._rows, self._bytes
        rows = int(record["rows"][0])
        with writing(self._path):
            self._note(record.tobytes(), rows, len(values) - KEY_BYTES * rows)
            self._files[1].write(values[: KEY_BYTES * rows])
            self._files[0].write(values[KEY_BYTES * rows :])

    def _note(self, record: bytes, rows: int, length: int) -> None:
        self._files[2].write(record)
        self._sum = zlib.crc32(record, self._sum)
        self._frames += 1
        self._rows += rows
        self._bytes += length

    def close(self, *, lasting: bool = True) -> dict[str, int]:
        """Close the files. Return what `Spilled` needs to know about them.

        **Arguments**

        - `lasting`: sync them to disk, so that they survive a crash of the machine.
        """
        with writing(self._path):
            for file in self._files:
                if lasting:
                    to_disk(file)
                file.close()
        return {"bytes": self._bytes, "rows": self._rows, "frames": self._frames, "sum": self._sum}

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            with suppress(OSError):  # the error that matters has been raised already
                file.close()


class Spilled:
    """Reads frames. Raises `BadFile` if the files are not as they were written.

    **Arguments**

    - `folder`: folder of the files.
    - `told`: what `Spill.close` returned.
    - `then`: what errors tell the user to do.
    - `name`: name of the files.
    """

    def __init__(self, folder: Path, told: Mapping[str, int], then: str, name: str = ROWS) -> None:
        self._path, self._then, self._told = path_of(folder, name), then, told
        self._paths = _paths(self._path)
        self._files: list[BinaryIO] = []
        try:
            sizes = (told["bytes"], told["rows"] * KEY_BYTES, told["frames"] * RECORD.itemsize)
            for path, size in zip(self._paths, sizes, strict=True):
                self._files.append(self._opened(path, size))
            total = 0
            for records in self._records():
                total = zlib.crc32(records.tobytes(), total)
            if total != told["sum"]:
                raise self._damaged("is not what was written", 2)
        except BaseException:
            self.close()
            raise

    def _opened(self, path: Path, size: int) -> BinaryIO:
        try:
            file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 closed by `close`
        except OSError as error:
            raise BadFile(str(path), f"cannot be read ({error.strerror})", self._then) from None
        if (has := os.fstat(file.fileno()).st_size) != size:
            file.close()
            raise BadFile(str(path), f"has {has:,} bytes, and had {size:,}", self._then)
        return file

    def _records(self) -> Iterator[np.ndarray]:
        """Yield all records, some at a time."""
        for first in range(0, self._told["frames"], _AT_ONCE):
            out = np.empty(min(_AT_ONCE, self._told["frames"] - first), RECORD)
            self._read(out.view(np.uint8), 2, first * RECORD.itemsize)
            yield out

    def frames(self, partition: int | None, highs: tuple[int, int] = ALL) -> tuple[np.ndarray, np.ndarray]:
        """Return the records of frames that may contain some of these rows, and the numbers of these frames (int64).

        **Arguments**

        - `partition`: partition of the rows; None for any.
        - `highs`: smallest and largest first half of their hashes.
        """
        first, last = map(np.uint64, highs)
        found, places, at = [np.empty(0, RECORD)], [np.empty(0, np.int64)], 0
        for records in self._records():
            own = (records["first"]["high"] <= last) & (records["last"]["high"] >= first)
            if partition is not None:
                own &= records["partition"] == partition
            which = np.flatnonzero(own)
            found.append(records[which])
            places.append(which + at)
            at += len(records)
        return np.concatenate(found), np.concatenate(places)

    def keys(self, records: np.ndarray) -> np.ndarray:
        """Return the sort keys and sizes of the rows of consecutive frames, see `keys_in`.

        **Arguments**

        - `records`: records of the frames.
        """
        ends = np.cumsum(records["rows"])
        keys = np.empty((self._checked(records, ends), 4), np.uint64)
        self._read(keys.reshape(-1).view(np.uint8), 1, KEY_BYTES * int(records["row"][0]))
        raw, begin = keys.reshape(-1).view(np.uint8).data, 0
        for record in records.tolist():
            partition, rows, length, row, *_, total, _ = record
            end = begin + KEY_BYTES * rows
            if sum_of_keys(partition, rows, length, raw[begin:end]) != total:
                raise self._damaged(f"is damaged behind byte {KEY_BYTES * row:,}", 1)
            begin = end
        for name, at in (("first", ends - records["rows"]), ("last", ends - 1)):
            for k, column in enumerate(("high", "low", "time")):
                if not np.array_equal(records[name][column].view(np.uint64), keys[at, k]):
                    raise self._damaged("is not what was written", 2)
        return keys

    def _checked(self, records: np.ndarray, ends: np.ndarray) -> int:
        """Return the number of rows of consecutive frames, after checking that their records are consistent."""
        rows, lengths, told = records["rows"], records["length"], self._told
        right = (rows > 0).all() and (rows <= told["rows"]).all()
        right &= (lengths >= 0).all() and (lengths <= told["bytes"]).all()
        for name, sizes, total in (("row", rows, told["rows"]), ("offset", lengths, told["bytes"])):
            at = records[name]
            right &= bool((at >= 0).all() and at[-1] <= total - sizes[-1] and (np.diff(at) == sizes[:-1]).all())
        if not right:
            raise self._damaged("is not what was written", 2)
        return int(ends[-1])

    def read(self, records: np.ndarray, out: np.ndarray) -> None:
        """Read the packed rows of consecutive frames (uint8). Call `keys` first, which checks their records.

        **Arguments**

        - `records`: records of the frames.
        - `out`: array to read into.
        """
        self._read(out, 0, int(records["offset"][0]))
        raw, begin = out.data, 0
        for length, offset, total in zip(*(records[name].tolist() for name in ("length", "offset", "sum_of_rows"))):
            if zlib.crc32(raw[begin : begin + length]) != total:
                raise self._damaged(f"is damaged behind byte {offset:,}")
            begin += length

    def _read(self, out: np.ndarray, file: int, offset: int) -> None:
        view, at = out.data, 0
        while at < len(view):  # one call reads at most 2 GiB
            got = os.preadv(self._files[file].fileno(), [view[at:]], offset + at)
            if not got:
                raise self._damaged(f"ends behind byte {offset + at:,}", file)
            at += got

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def lost(self, rows: int, had: int) -> BadFile:
        """Return the error to raise if fewer or more rows are found than were written.

        **Arguments**

        - `rows`: number of rows found.
        - `had`: number of rows written.
        """
        return self._damaged(f"has {rows:,} rows of a file, and had {had:,}")

    def _damaged(self, found: str, file: int = 0) -> BadFile:
        return BadFile(str(self._paths[file]), found, self._then)


def path_of(folder: Path, name: str = ROWS) -> Path:
    """Return the path of a spill's file of rows; the other files have the same name with a suffix.

    **Arguments**

    - `folder`: folder of the spill.
    - `name`: name of the spill.
    """
    return folder / name


def _paths(path: Path) -> list[Path]:
    """Return the paths of a spill's files: rows, sort keys and index."""
    return [path, path.with_name(f"{path.name}.keys"), path.with_name(f"{path.name}.index")]
