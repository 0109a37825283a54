"""A segment, one part of a log: a file of records and a file of their keys, both append-only."""

import hashlib
import re
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Pairs, Record
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.records import HEADER, INDEX_BITS, encode, hash_keys
from skirl.tools.jit import read_only
from skirl.tools.sealed_json import CheckpointError

FORMAT_VERSION = 2
_PIECE = 1 << 16  # rows written at a time
_HEAD = struct.Struct("<8sIIIIQ24x")  # and 8 bytes of SHA-256
_MAGIC = {".rows": b"skirlrow", ".keys": b"skirlkey"}


@dataclass(frozen=True)
class SegmentEntry:
    name: str
    record: Record
    count: int
    keys_hash: int

    def to_text(self) -> str:
        return f"{self.name} {self.record.width} {self.record.dtype} {self.count} {self.keys_hash:016x}"

    @classmethod
    def from_text(cls, text: str) -> "SegmentEntry":
        name, width, dtype, count, keys_hash = text.split(" ")
        if not re.fullmatch("[0-9a-f]{16}", name):
            raise CheckpointError(f"{name!r} is not a segment: do not trust the folder that names it")
        return cls(name, Record(int(width), dtype), int(count), int(keys_hash, 16))

    @property
    def id(self) -> int:
        return int(self.name, 16)

    def files(self) -> dict[str, int]:
        """Return the names of its files, and how many bytes each must have at least to hold all records of the entry."""
        return {
            f"{self.name}.rows": HEADER + self.count * stride(self.record),
            f"{self.name}.keys": HEADER + self.count * 8,
        }


@dataclass
class Segment:
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
    synced: int = 0
    """Number of durable records; -1 for files of an earlier process, whose size may not be durable."""
    suspect: bool = False
    """True if its rows must be written again: a sync failed, so its bytes may never reach the disk, or its name is taken."""
    behind: int = 0
    """Bytes in the files past the last record, which a frozen state may need."""


def stride(record: Record) -> int:
    return record.nbytes + 4


def header(suffix: str, record: Record, segment: int) -> bytes:
    size = np.dtype(record.dtype).itemsize
    head = _HEAD.pack(_MAGIC[suffix], FORMAT_VERSION, record.width, size, 0, segment)
    return head + hashlib.sha256(head).digest()[:8]


def check_header(files: OsFiles, file: int, path: Path, record: Record, segment: int) -> None:
    if files.read(file, HEADER, 0) != header(path.suffix, record, segment):
        raise Unusable(
            f"{path} does not begin as segment {segment:016x} of format {FORMAT_VERSION}: it is damaged, another file, or "
            "of another version of skirl"
        )


def begin(files: OsFiles, folder: Path, record: Record, added: list[Path]) -> tuple[str, Handle, Handle]:
    """Create both files of a new segment, with their headers. List them in `added`, even if it fails."""
    name, made = secrets.token_hex(8), list[Handle]()
    for suffix in (".rows", ".keys"):
        path = folder / f"{name}{suffix}"
        made.append(Handle(files, lambda path=path: files.create(path)))
        added.append(path)
        files.write(made[-1].number, header(suffix, record, int(name, 16)), 0)
    return name, made[0], made[1]


def write_segments(
    files: OsFiles, folder: Path, record: Record, pairs: Pairs, added: list[Path]
) -> Iterator[SegmentEntry]:
    """Write keys and rows to new segments, which nobody reads before they are yielded: durable but for their files' names.

    Their files are listed in `added`, even if this fails.
    """
    size = stride(record)
    name, made, count, state = "", list[Handle](), 0, np.uint64(0)

    def finished() -> SegmentEntry:
        for file in made:
            files.sync(file.number)
            file.close()
        return SegmentEntry(name, record, count, int(state))

    for all_keys, all_rows in pairs:
        for start in range(0, len(all_keys), _PIECE):
            keys, rows = all_keys[start : start + _PIECE], all_rows[start : start + _PIECE]
            if made and count + len(keys) > 1 << INDEX_BITS:
                yield finished()
                made = []
            if not made:
                name, *made = begin(files, folder, record, added)
                count, state = 0, np.uint64(0)
            out = np.empty(len(keys) * (size // 4), np.uint32)
            encode(rows.reshape(-1).view(np.uint32), size // 4 - 1, keys, np.uint64(int(name, 16)), count, out)
            state = np.uint64(hash_keys(read_only(keys), state))
            for file, data, at in zip(made, (out, keys), (count * size, count * 8), strict=True):
                files.write(file.number, data.data, HEADER + at)
            count += len(keys)
    if made:
        yield finished()


def read_keys(folder: Path, entry: SegmentEntry) -> NDArray[np.int64]:
    """Read the keys of a segment, which takes a small part of what reading its rows would. A key may come twice."""
    path = folder / f"{entry.name}.keys"
    try:
        return np.fromfile(path, np.int64, entry.count, offset=HEADER)
    except OSError:
        raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again") from None
