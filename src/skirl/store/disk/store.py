"""A store on disk: for tables larger than memory, with durable points that survive a kill and a power loss; and one that
only reads a checkpoint's rows.

README.md in this folder says which files there are, what is atomic, and how a store recovers.
"""

import contextlib
import errno
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, Layout, Record, Rows, SavedRows, Store
from skirl.store.disk import frozen, os_files
from skirl.store.disk import log as all_logs
from skirl.store.disk import manifest as manifests
from skirl.store.disk.log import Cleaner, Log
from skirl.store.disk.manifest import NAME, Manifest
from skirl.store.disk.os_files import DiskError, DiskFull, OsFiles, Unusable, explained
from skirl.tools.threads import Gate

__all__ = ["DiskError", "DiskFull", "DiskStore"]

_PIECE = 1 << 16  # rows looked up and moved at a time


class DiskStore(Store):
    """Rows in a folder of their own.

    **Arguments**

    - `path`: the folder: new, empty, or made by a disk store.
    - `layout`: the records of each table; a mapping will do.
    - `rows`: number of rows of each table. The index in memory then takes 7 bytes per row held; with None it takes 14.
    - `files`: the calls to the operating system, which tests replace; None makes them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DiskStore(folder, {0: Record(2)}) as store:
    ...         _ = store.write(np.array([5]), np.array([[1, 2]], np.float32))
    ...     with DiskStore(folder, {0: Record(2)}) as store:
    ...         out = np.zeros((2, 2), np.float32)
    ...         print(store.read(np.array([4, 5]), out), store.generation)
    [False  True] 1
    """

    durable = True
    share = 1.5
    """Most bytes on disk per byte of rows held. With less, rows are written again more often."""

    def __init__(
        self,
        path: str | Path,
        layout: Layout | Mapping[int, Record],
        *,
        rows: Mapping[int, int] | None = None,
        files: OsFiles | None = None,
    ) -> None:
        super().__init__(layout)
        self._rows = rows
        self.path = Path(path)
        self._files = files or OsFiles()
        self._gate = Gate()
        self._writing = threading.RLock()
        self._pid = os.getpid()
        self._lock: os_files.Lock | None = None
        self._set_logs([])
        self._changed = False
        try:
            with explained(self.path):
                self._open()
        except BaseException:
            self._let_go()
            raise
        self._tried = self.generation

    def __repr__(self) -> str:
        return f"disk:{self.path}"

    # Opening

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise DiskError(f"{self.path} is a file: name a new or an empty folder")
        try:
            self._files.make_folder(self.path)
            self._lock = os_files.Lock(self.path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):  # the last one in /proc
                raise
            raise DiskError(
                f"{self.path} cannot be written to ({error.strerror}): name another folder, or make it writable"
            ) from error
        names = os.listdir(self.path)
        others = [name for name in names if name != os_files.NAME and not manifests.OURS.fullmatch(name)]
        if NAME in others:
            self._load(Manifest.read(self.path / NAME))
        elif others:
            raise DiskError(
                f"the store's folder {self.path} holds other files, such as {others[0]!r}: name a new or an empty folder"
            )
        elif any(name.endswith((".rows", ".keys")) for name in names):
            raise Unusable(f"{self.path / NAME} is missing")
        else:
            self._begin()

    def _begin(self) -> None:
        self._set_logs(self._empty())
        self._write_manifest(self.identity, 0, self._logs)
        self._remove_strangers()

    def _empty(self) -> list[Log]:
        layout = self.layout
        return [Log(self.path, record, self._files, self._gate, layout, self._rows) for record in layout.kinds]

    def _set_logs(self, logs: list[Log]) -> None:
        self._logs, self._cleaner = logs, Cleaner(logs, self.share, self._point)

    def _load(self, manifest: Manifest) -> None:
        if manifest.layout != self.layout:
            if not manifest.segments:  # it may have been made by a run that was refused
                return self._begin()
            has, need = manifest.layout.against(self.layout)
            raise DiskError(
                f"{self.path} has records {has}, the tables need some {need}: open it with the tables and "
                "the optimizer it was made with, or name another folder"
            )
        self._set_logs(self._empty())
        all_logs.load(self._logs, manifest)
        self.identity, self.generation, self.about = manifest.identity, manifest.generation, dict(manifest.about)
        # After a kill the manifest's rename may not be durable yet. The files of the old one must not go before it is.
        self._files.sync_folder(self.path)
        for log in self._logs:
            log.trim()
        self._remove_strangers()

    def _remove_strangers(self) -> None:
        manifests.remove_but(self._files, self.path, {path.name for path in all_logs.paths(self._logs)})

    # Rows

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        with explained(self.path):
            for start in range(0, keys.size, _PIECE):
                piece = slice(start, start + _PIECE)
                with self._gate:
                    with self._gate.lookup():
                        log = self._logs[kind]
                        positions = log.index.locate(keys[piece])
                    log.rows_at(positions, keys[piece], out[piece])
                found[piece] = positions >= 0

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """If it fails, some of the rows may be held; the same call can be repeated."""
        words = rows.reshape(-1).view(np.uint32)
        with self._writing:
            log = self._logs[kind]
            each = words.size // keys.size
            with explained(self.path):
                for start in range(0, keys.size, _PIECE):
                    piece = keys[start : start + _PIECE]
                    self._cleaner.make_room(log, piece.size)
                    self._changed = True
                    log.append(piece, words[start * each : (start + piece.size) * each])

    def held(self) -> Iterator[NDArray[np.int64]]:
        """In the order of the rows on disk. The key of a row written during the iteration may come twice."""
        self._check_open()
        for kind in range(len(self._logs)):
            ordinal, start = -1, 0
            while True:
                with explained(self.path), self._gate, self._gate.lookup():
                    log = self._logs[kind]
                    there = list(log.segments.values())  # a copy: a writer may begin a segment meanwhile
                    segment = next((s for s in there if s.ordinal >= ordinal), None)
                    if segment is None:
                        break
                    start = start if segment.ordinal == ordinal else 0
                    keys, start = log.keys_from(segment, start)
                    ordinal = segment.ordinal if start else segment.ordinal + 1
                if keys.size:
                    yield keys

    # Durable points

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        """If any row was written, this makes a durable point of a new generation."""
        if about is not None:
            self._check_open()
            with self._writing, explained(self.path):
                before = self.about
                self.about = {name: of if isinstance(of, str) else of.digest for name, of in about.items()}
                if self._changed:
                    self._point()
                elif self.about != before:
                    self._write_manifest(self.identity, self.generation, self._logs)
        return sum(log.index.count for log in self._logs)

    def _next_generation(self) -> int:
        # Never the same number twice: a point that failed may have reached the disk anyway.
        self._tried = max(self._tried, self.generation) + 1
        return self._tried

    def _point(self) -> None:
        """Make a durable point. The cleaner asks for one too, so that dead segments can be removed."""
        generation = self._next_generation() if self._changed else self.generation
        all_logs.sync(self._logs, self._files)
        self._write_manifest(self.identity, generation, self._logs)
        self.generation, self._changed = generation, False
        gone = [(log, dead) for log in self._logs if (dead := log.dead())]
        if gone:
            self._cleaner.forget([segment for _, dead in gone for segment in dead])
            with self._gate.alone():
                for log, dead in gone:
                    log.drop(dead)
            for segment in (segment for _, dead in gone for segment in dead):
                self._files.remove(segment.rows_path)
                self._files.remove(segment.keys_path)

    def _manifest(self, identity: str, generation: int, logs: list[Log]) -> Manifest:
        entries = [entry for log in logs for entry in log.entries()]
        return Manifest(identity, generation, self.layout, entries, dict(self.about))

    def _write_manifest(self, identity: str, generation: int, logs: list[Log]) -> None:
        manifests.replace(self._files, self.path, NAME, self._manifest(identity, generation, logs).sealed())

    # Frozen states

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """By hard links. If the folder is on another file system, files are kept open, and `Frozen.write` copies them."""
        self._check_open()
        with self._writing:
            with explained(self.path):
                for log in self._logs:
                    log.seal()
                    if any(segment.suspect for segment in log.segments.values()):
                        log.sync()  # appends their rows again
                        log.seal()
            # Errors from here on are about the folder and its disk, which may not be the store's, so they stay as they are.
            generation = self._next_generation()
            manifest = self._manifest(self.identity, generation, self._logs)
            segments = [s for log in self._logs for s in log.segments.values() if log.live[s.slot]]
            unsynced = [segment.name for segment in segments if segment.synced < 0]
            state = frozen.freeze_segments(self._files, self.path, folder, manifest, unsynced)
            self.generation, self._changed = generation, True
        return state

    def thaw(self, saved: SavedRows) -> None:
        """This is a durable point. Files of a whole store are linked or copied; other rows are appended."""
        self._check_open()
        with self._writing, explained(self.path), frozen.named(saved.folder, self.path):
            logs, added, header = self._empty(), list[Path](), self.path / NAME
            before = header.read_bytes()
            try:
                frozen.take(self._files, saved.parts, self.layout, saved.folder, logs, added)
                all_logs.sync(logs, self._files)
                self._write_manifest(saved.identity, saved.generation, logs)
            except BaseException:
                for log in logs:
                    log.close()
                if header.read_bytes() == before:  # else the manifest names the added files
                    manifests.undo(self._files, added)
                raise
            with self._gate.alone():
                old = self._logs
                self._set_logs(logs)
                self._changed = False
                self.identity, self.generation, self._tried = saved.identity, saved.generation, saved.generation
                for log in old:
                    log.close()
            self._remove_strangers()

    # Closing

    def close(self, *, flush: bool = True) -> None:
        """Without a flush it stays at the last durable point."""
        if not self.closed:
            try:
                if flush:
                    self.flush()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        if not self.closed and os.getpid() == self._pid:  # in a forked child, the lock's holder may not exist
            with self._writing, self._gate.alone():
                self.closed = True
                for log in self._logs:
                    log.close()
                self._set_logs([])
                if self._lock is not None:
                    self._lock.release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._let_go()

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._pid:
            raise ValueError(f"{self!r} was opened by the process that this one was forked from: use it there")


log = logging.getLogger("skirl")


class CheckpointRows(Store):
    """The store behind `store="checkpoint"`: empty until `skirl.load` gives it a checkpoint's rows; it refuses writes.

    Files are hard-linked into a temporary folder next to the checkpoint; if none can be made there, they are copied to the
    system's folder for temporary files. Closing the store removes that folder.

    **Arguments**

    - `layout`: the records of each table; a mapping will do.
    - `rows`: number of rows of each table, as for a disk store.
    """

    read_only = True

    def __init__(self, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None) -> None:
        super().__init__(layout)
        self._table_rows = rows
        self._disk: DiskStore | None = None
        self._remove: Callable[[], Any] = lambda: None

    @property
    def ready(self) -> bool:
        return self._disk is not None

    def thaw(self, saved: SavedRows) -> None:
        """The files must not change while the store is open, but may be unlinked."""
        self._check_open()
        beside = folder_beside(saved.folder.parent)
        with ExitStack() as given_up:
            given_up.callback(shutil.rmtree, beside, ignore_errors=True)
            disk = given_up.enter_context(DiskStore(beside / "rows", self.layout, rows=self._table_rows))
            disk.thaw(saved)
            given_up.pop_all()
        self._let_go()
        self._disk, self._remove = disk, weakref.finalize(self, _remove, beside, os.getpid())
        self.identity, self.generation = saved.identity, saved.generation

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        if self._disk is not None:
            self._disk._read(kind, keys, out, found)

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        raise ValueError(
            "the rows of a checkpoint are not written to: to train them, make the embeddings with store='memory' or "
            "'disk:FOLDER' and load the checkpoint into those"
        )

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        self.about = self.about if about is None else dict(about)
        return 0 if self._disk is None else len(self._disk)

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        return iter(()) if self._disk is None else self._disk.held()

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        raise ValueError("these rows are a checkpoint's: to save them elsewhere, copy its folder")

    def close(self, *, flush: bool = True) -> None:
        if not self.closed:
            super().close()
            self._let_go()

    def _let_go(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        self._remove()


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def folder_beside(folder: Path) -> Path:
    """Make a temporary folder in `folder`, so that files can be hard-linked into it; elsewhere if that fails."""
    try:
        return Path(mkdtemp(dir=folder, prefix="reading-"))
    except OSError as error:
        log.warning("%s cannot be written to (%s): its rows are copied to be read", folder, error.strerror)
        return Path(mkdtemp(prefix="skirl-reading-"))
