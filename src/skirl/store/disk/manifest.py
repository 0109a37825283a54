"""Segments, the parts of a log: a file of records and a file of their keys, both append-only, which a store and its frozen
states share by hard links. And the manifest: which segments a disk store holds at a durable point, and how much of each."""

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Layout, Pairs, Record
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.records import HEADER, INDEX_BITS, encode, hash_keys
from skirl.tools import __version__
from skirl.tools.jit import read_only
from skirl.tools.sealed_json import CheckpointError, read_sealed, seal

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


NAME = "store.json"
FORMAT = "skirl-disk-store"


OURS = re.compile(r"[0-9a-f]{16}\.(rows|keys)(\.tmp)?|store\.json-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class Manifest:
    identity: str
    generation: int
    layout: Layout
    segments: list[SegmentEntry]
    """The segments kind by kind, in the order of each log."""
    about: dict[str, str] = field(default_factory=dict)
    """The start values of each table's rows: an initialiser and its seed, or the digest of an array."""
    resident: list[SegmentEntry] | None = None
    """For rows of caches: segments whose keys are those of the rows that were there. Other rows in `segments` had left.
    Empty: none had. None: these are rows of a store."""

    def facts(self) -> dict[str, Any]:
        return {
            "segment_format": FORMAT_VERSION,
            "identity": self.identity,
            "generation": self.generation,
            "layout": self.layout.facts(),
            "segments": [entry.to_text() for entry in self.segments],
            **({"begun": self.about} if self.about else {}),
            **({} if self.resident is None else {"resident": [entry.to_text() for entry in self.resident]}),
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Manifest":
        segments, resident = ([*map(SegmentEntry.from_text, facts.get(of, ()))] for of in ("segments", "resident"))
        return cls(
            facts["identity"],
            facts["generation"],
            Layout.from_facts(facts["layout"]),
            segments,
            facts.get("begun", {}),
            resident if "resident" in facts else None,
        )

    def sealed(self) -> bytes:
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "skirl": __version__}
        return seal(head | {"facts": self.facts()})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        try:
            body = read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="disk store")
        except CheckpointError as error:
            text, _, advice = str(error).rpartition(": ")
            raise Unusable(text, advice if "version" in advice else "") from None
        return cls.from_facts(body["facts"])


def replace(files: OsFiles, folder: Path, name: str, content: bytes) -> None:
    """Replace a header atomically: at every moment the old one or the new one is there, complete."""
    draft = folder / f"{name}-{secrets.token_hex(8)}.tmp"
    try:
        files.put(draft, content)
        files.rename(draft, folder / name)
    except BaseException:
        with suppress(OSError):
            files.remove(draft)
        raise
    files.sync_folder(folder)


def take_over(
    files: OsFiles,
    entries: list[SegmentEntry],
    source: Path,
    target: Path,
    added: list[Path],
    later: list[tuple[Handle, Path]] | None = None,
) -> None:
    """Link or copy segments' files from one folder to another. Append new paths to `added`, but not those of shorter files,
    which are replaced. With `later`, files that cannot be linked are opened, and the caller copies and closes them."""
    for entry in entries:
        for name, size in entry.files().items():
            old, new = source / name, target / name
            there = new.is_file()
            if there and new.stat().st_size >= size:
                continue  # names are random, so it is the same file, and files only grow
            if not there:
                added.append(new)
            if later is None:
                files.share(old, new)
            elif not files.linked(old, new):
                later.append((files.opened(old), new))


def is_shorter(folder: Path, entry: SegmentEntry) -> bool:
    files = {folder / name: size for name, size in entry.files().items()}
    return any(path.is_file() and path.stat().st_size < size for path, size in files.items())


def undo(files: OsFiles, added: list[Path]) -> None:
    for path in added:
        with suppress(OSError):
            files.remove(path)


def remove_but(files: OsFiles, folder: Path, known: set[str]) -> None:
    """Remove all files of ours except those in `known`: leftovers of a kill or of an older durable point."""
    for name in os.listdir(folder):
        if OURS.fullmatch(name) and name not in known:
            files.remove(folder / name)


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
        if (found := path.stat().st_size) < size:  # longer: the file of a store that went on before it was killed
            raise CheckpointError(f"{path} has {found:,} bytes, {size:,} were written: use another checkpoint")
