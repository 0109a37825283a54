"""A segment, one part of a log: a file of records and a file of their keys, both append-only."""

import hashlib
import re
import secrets
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Record, Rows
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.records import HEADER, INDEX_BITS, Keys, encode, hash_keys
from skirl.tools.jit import read_only
from skirl.tools.sealed_json import CheckpointError

FORMAT_VERSION = 1
_HEAD = struct.Struct("<8sIIIIQ24x")  # and 8 bytes of SHA-256
_MAGIC = {".rows": b"skirlrow", ".keys": b"skirlkey"}


@dataclass(frozen=True)
class SegmentEntry:
    """A segment, as listed in a manifest."""

    name: str
    record: Record
    count: int
    keys_hash: int
    rows_bytes: int
    keys_bytes: int

    def to_text(self) -> str:
        """Return the entry as one line, for `from_text`."""
        record = self.record
        sizes = f"{self.rows_bytes} {self.keys_bytes}"
        return f"{self.name} {record.width} {record.dtype} {self.count} {self.keys_hash:016x} {sizes}"

    @classmethod
    def from_text(cls, text: str) -> "SegmentEntry":
        """Parse what `to_text` returned. Raise a TypeError or ValueError if `text` is no entry."""
        name, width, dtype, count, keys_hash, rows_bytes, keys_bytes = text.split(" ")
        if not re.fullmatch("[0-9a-f]{16}", name):
            raise ValueError(f"{name!r} is not a segment")
        record = Record(int(width), dtype)
        return cls(name, record, int(count), int(keys_hash, 16), int(rows_bytes), int(keys_bytes))

    @property
    def id(self) -> int:
        """The segment's random number, which is its name in hexadecimal."""
        return int(self.name, 16)

    def files(self) -> dict[str, int]:
        """Return the names of its files, and the size of each."""
        return {f"{self.name}.rows": self.rows_bytes, f"{self.name}.keys": self.keys_bytes}

    def sized(self, folder: Path) -> "SegmentEntry":
        """Return a copy of the entry with the sizes that its files have in a folder."""
        rows_bytes, keys_bytes = ((folder / name).stat().st_size for name in self.files())
        return replace(self, rows_bytes=rows_bytes, keys_bytes=keys_bytes)

    def least(self) -> dict[str, int]:
        """Return the names of its files, and how many bytes each must have at least to hold all records of the entry."""
        return {
            f"{self.name}.rows": HEADER + self.count * stride(self.record),
            f"{self.name}.keys": HEADER + self.count * 8,
        }


@dataclass
class Segment:
    """A segment of an open log."""

    name: str
    slot: int
    rows: Handle
    """File of records, open as long as the log has the segment."""
    keys: Handle
    """File of keys, open only while it is being written."""
    rows_path: Path
    keys_path: Path
    ordinal: int = 0
    """Its number in the log; later segments have larger ones."""
    sent: int = 0
    """Number of records that the disk was asked to start writing."""
    synced: int = 0
    """Number of durable records; -1 for files of an earlier process, whose size may not be durable."""
    suspect: bool = False
    """True if its rows must be written again: a sync failed, so its bytes may never reach the disk, or its name is taken."""
    behind: int = 0
    """Bytes in the files past the last record, which a frozen state may need."""


def stride(record: Record) -> int:
    """Return the bytes of a record in a file."""
    return record.nbytes + 4


def header(suffix: str, record: Record, segment: int) -> bytes:
    """Return the header of a segment's file."""
    size = np.dtype(record.dtype).itemsize
    head = _HEAD.pack(_MAGIC[suffix], FORMAT_VERSION, record.width, size, 0, segment)
    return head + hashlib.sha256(head).digest()[:8]


def check_header(files: OsFiles, file: int, path: Path, record: Record, segment: int) -> None:
    """Raise an Unusable if the file does not begin with the header of this segment."""
    found = files.read(file, HEADER, 0)
    if found == header(path.suffix, record, segment):
        return
    if len(found) == HEADER and hashlib.sha256(found[:-8]).digest()[:8] == found[-8:]:
        magic, version, width, size, _, other = _HEAD.unpack(found[:-8])
        if magic == _MAGIC[path.suffix] and version != FORMAT_VERSION:
            raise Unusable(
                f"{path} is in format {version}, this skirl reads format {FORMAT_VERSION}",
                "use the version that wrote it",
            )
        if magic in _MAGIC.values():
            raise Unusable(
                f"{path} has been replaced by a file of segment {other:016x}, with records of {width} x {size} bytes"
            )
    raise Unusable(f"{path} is damaged in its first {HEADER} bytes")


def begin(files: OsFiles, folder: Path, record: Record, added: list[Path]) -> tuple[str, Handle, Handle]:
    """Create both files of a new segment, with their headers. List them in `added`, even if it fails."""
    name, made = secrets.token_hex(8), list[Handle]()
    for suffix in (".rows", ".keys"):
        path = folder / f"{name}{suffix}"
        made.append(Handle(files, lambda path=path: files.create(path)))
        added.append(path)
        files.write(made[-1].number, header(suffix, record, int(name, 16)), 0)
    return name, made[0], made[1]


class SegmentWriter:
    """A new segment, for a folder in which nobody reads it before it is finished. Its files are listed in `added`."""

    def __init__(self, files: OsFiles, folder: Path, record: Record, added: list[Path]) -> None:
        self._files, self._record = files, record
        self._name, *self._made = begin(files, folder, record, added)
        self._count, self._state = 0, np.uint64(0)

    def write(self, keys: Keys, rows: Rows) -> int:
        """Write as many rows as it has room for, and return how many."""
        n = min(len(keys), (1 << INDEX_BITS) - self._count)
        size, words = stride(self._record), stride(self._record) // 4 - 1
        some, out = keys[:n], np.empty(n * (words + 1), np.uint32)
        encode(rows[:n].reshape(-1).view(np.uint32), words, some, np.uint64(int(self._name, 16)), self._count, out)
        self._state = np.uint64(hash_keys(read_only(some), self._state))
        by_rows, by_keys = (file.number for file in self._made)
        self._files.write(by_rows, out.data, HEADER + self._count * size)
        self._files.write(by_keys, some.data, HEADER + self._count * 8)
        self._files.send(by_rows, HEADER + self._count * size, n * size)
        self._count += n
        return n

    def finish(self) -> SegmentEntry:
        """Wait until it is durable but for the names of its files."""
        for file in self._made:
            self._files.sync(file.number)
            file.close()
        sizes = HEADER + self._count * stride(self._record), HEADER + self._count * 8
        return SegmentEntry(self._name, self._record, self._count, int(self._state), *sizes)


def read_keys(folder: Path, entry: SegmentEntry) -> NDArray[np.int64]:
    """Read the keys of a segment, which takes a small part of what reading its rows would. A key may come twice."""
    path = folder / f"{entry.name}.keys"
    try:
        return np.fromfile(path, np.int64, entry.count, offset=HEADER)
    except OSError:
        raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again") from None
