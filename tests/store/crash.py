"""A disk that loses power: the contents that it may have after any prefix of a store's calls.

`Recorder` does what the store asks and records it. `Disk` takes the first k of these calls, and tells what a machine
that was switched off there may find when it comes up again: a file's bytes as of its last sync, plus any part of what
was written since, in any order, torn at sectors or bytes; and a folder's names as of its last sync, plus any of the
changes since. That is more than any journaling file system does, and all that POSIX allows. A kill -9 is the case in
which nothing is lost.
"""

import errno
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from skirl.store.disk.os_files import OsFiles

SECTOR = 512
Op = tuple[Any, ...]


class Unsynced(OsFiles):
    """Skips all syncs."""

    def sync(self, file: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class NoLinks(OsFiles):
    """Frozen rows are on another file system, so they are copied."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")


class Recorder(OsFiles):
    """Carries out calls and records them. Syncs nothing, because the disk in question is simulated."""

    on_rename = staticmethod(lambda path: None)
    """Called before a header is renamed."""

    def __init__(self, root: Path, first: "Disk | None" = None) -> None:
        """first: the durable part of what is in `root`; None: all of it."""
        self.root = root
        self.ops: list[Op] = []
        self.first = first or Disk.of(root)
        # Our own inode numbers: the system reuses those of deleted files.
        self.inodes = {root / path: inode for path, inode in self.first.killed().names.items()}
        self.files: dict[int, int] = {}
        self.made = itertools.count(1 << 64)

    def note(self, *op: Any) -> None:
        """Record one more call, with paths relative to the root."""
        if op[0] == "rename" and op[2].suffix == ".json":
            self.on_rename(op[2])
        self.ops.append(tuple(part.relative_to(self.root) if isinstance(part, Path) else part for part in op))

    def path_of(self, file: int) -> str:
        return next(path.name for path, inode in self.inodes.items() if inode == self.files[file])

    def make_one_folder(self, path: Path) -> None:
        super().make_one_folder(path)
        self.note("folder", path)

    def create(self, path: Path) -> int:
        file = super().create(path)
        self.inodes[path] = self.files[file] = next(self.made)
        self.note("create", path, self.files[file])
        return file

    def open(self, path: Path, *, writable: bool = False) -> int:
        file = super().open(path, writable=writable)
        self.files[file] = self.inodes[path]
        return file

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        super().write(file, data, offset)
        self.note("write", self.files[file], offset, bytes(memoryview(data).cast("B")))

    def truncate(self, file: int, size: int) -> None:
        super().truncate(file, size)
        self.note("truncate", self.files[file], size)

    def sync(self, file: int) -> None:
        self.note("sync", self.files[file])

    def sync_folder(self, path: Path) -> None:
        self.note("sync folder", path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.inodes[new] = self.inodes.pop(old)
        self.note("rename", old, new, self.inodes[new])

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self.inodes[new] = self.inodes[old]
        self.note("link", new, self.inodes[new])

    def remove(self, path: Path) -> None:
        super().remove(path)
        del self.inodes[path]
        self.note("remove", path)

    def disk(self, k: int) -> "Disk":
        """Return the disk after the first k calls."""
        disk = self.first.copy()
        for op in self.ops[:k]:
            disk.do(op)
        return disk


@dataclass
class Disk:
    """The durable contents, and the calls since the sync that would have made them durable."""

    contents: dict[int, bytes] = field(default_factory=dict)
    names: dict[Path, int] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    unsynced: dict[int, list[Op]] = field(default_factory=dict)
    unnamed: list[Op] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> "Disk":
        """Return a disk with all that is in a folder, to start from."""
        disk = cls()
        for path in root.rglob("*"):
            if path.is_dir():
                disk.folders.add(path.relative_to(root))
            else:
                disk.names[path.relative_to(root)] = path.stat().st_ino
                disk.contents[path.stat().st_ino] = path.read_bytes()
        return disk

    def copy(self) -> "Disk":
        unsynced = {inode: list(ops) for inode, ops in self.unsynced.items()}
        return Disk(dict(self.contents), dict(self.names), set(self.folders), unsynced, list(self.unnamed))

    def do(self, op: Op) -> None:
        match op:
            case ("write" | "truncate", inode, *_):
                self.unsynced.setdefault(inode, []).append(op)
            case ("sync", inode):
                content = bytearray(self.contents.get(inode, b""))
                for done in self.unsynced.pop(inode, []):
                    _apply(content, done)
                self.contents[inode] = bytes(content)
            case ("sync folder", folder):
                for done in [done for done in self.unnamed if done[1].parent == folder]:
                    self.name(done)
                    self.unnamed.remove(done)
            case _:
                self.unnamed.append(op)

    def name(self, op: Op) -> None:
        match op:
            case ("folder", path):
                self.folders.add(path)
            case ("create" | "link", path, inode):
                self.names[path] = inode
            case ("rename", old, new, inode):
                self.names.pop(old, None)
                self.names[new] = inode
            case ("remove", path):
                self.names.pop(path, None)
            case _:
                raise AssertionError(op)

    def power_off(self, rng: np.random.Generator) -> "Disk":
        """Return one of the disks that may be found after a power loss."""
        after = self.copy()
        keep = rng.choice([0.0, 0.5, 1.0])
        for op in self.unnamed:
            if rng.random() < keep:
                after.name(op)
        for inode, ops in self.unsynced.items():
            after.contents[inode] = _survivors(self.contents.get(inode, b""), ops, rng)
        after.unsynced, after.unnamed = {}, []
        return after

    def killed(self) -> "Disk":
        """Return the disk found after a kill, which has all that was asked for."""
        after = self.copy()
        for op in self.unnamed:
            after.name(op)
        for inode in self.unsynced:
            after.do(("sync", inode))
        after.unsynced, after.unnamed = {}, []
        return after

    def as_found(self) -> tuple[object, ...]:
        """Return all that a process can find on it: folders, names, bytes, and which names share a file."""
        first: dict[int, Path] = {}
        names = [(p, first.setdefault(i, p), self.contents.get(i, b"")) for p, i in sorted(self.names.items(), key=str)]
        return tuple(sorted(self.folders, key=str)), tuple(names)

    def write_to(self, root: Path) -> None:
        """Write it out as real files."""
        there: dict[int, str] = {}
        folders = {""}
        root.mkdir()
        for folder in sorted(map(str, self.folders)):  # as text, not paths: this runs for each crash
            if os.path.dirname(folder) in folders:
                os.mkdir(f"{root}/{folder}")
                folders.add(folder)
        for path, inode in self.names.items():
            if os.path.dirname(str(path)) not in folders:
                continue
            name = f"{root}/{path}"
            if inode in there:
                os.link(there[inode], name)
            else:
                with open(name, "wb") as file:
                    file.write(self.contents.get(inode, b""))
                there[inode] = name


def _apply(content: bytearray, op: Op) -> None:
    if op[0] == "truncate":
        size = op[2]
        content[size:] = bytes(max(0, size - len(content)))
    else:
        _, _, offset, data = op
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


def _survivors(before: bytes, ops: list[Op], rng: np.random.Generator) -> bytes:
    """Return a file that only some of the writes have reached."""
    content, way = bytearray(before), int(rng.integers(5))
    if way == 0:
        return before
    if way == 1:
        for op in ops:
            _apply(content, op)
        return bytes(content)
    if way == 2:  # all writes in order, up to one that is torn at a byte
        last = int(rng.integers(len(ops)))
        for op in ops[:last]:
            _apply(content, op)
        if ops[last][0] == "write":
            _, inode, offset, data = ops[last]
            _apply(content, ("write", inode, offset, data[: int(rng.integers(len(data) + 1))]))
        return bytes(content)
    for i in rng.permutation(len(ops)):  # sectors of all writes, in random order
        if ops[i][0] == "truncate":
            if rng.random() < 0.5:
                _apply(content, ops[i])
            continue
        _, inode, offset, data = ops[i]
        start = 0
        while start < len(data):
            stop = min(len(data), (offset + start) // SECTOR * SECTOR + SECTOR - offset)
            if rng.random() < 0.5:
                _apply(content, ("write", inode, offset + start, data[start:stop]))
            elif way == 4 and rng.random() < 0.5:  # the new size arrived, but the bytes are from somebody's old file
                _apply(content, ("write", inode, offset + start, rng.bytes(stop - start)))
            start = stop
    return bytes(content)
