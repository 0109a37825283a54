"""Rows on disk: tables larger than memory, and points that survive a kill and a power loss.

Rows are appended to a log and never changed in place, so nothing that was durable can be torn (see `_log.py`). Where each
row's newest record stands is in memory, 14 to 16 bytes a row (see `_places.py`). A *durable point* is a small manifest,
renamed into place after all that it names was synced; the store reopens at the last one, exactly.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from skirl.store._files import Files
from skirl.store._gate import Gate
from skirl.store._log import Log
from skirl.store._manifest import KIND, NAME, Manifest
from skirl.store._segment import Entry, Segment, Unusable
from skirl.store.base import Layout, Record, Rows, Store
from skirl.store.memory import MemoryStore
from skirl.store.snapshot import HEADER, Snapshot, SnapshotError
from skirl.tables import ROW_BITS

SLACK = 4 << 20
"""Bytes that a store may hold beyond its share, whatever its size."""
_LEAST_SHARE = 1.28  # of the bytes that rows take with key and checksum: for rows so small that 1.5 times leave no room
_PACE = 4  # records cleaned for each one written, once garbage has to go
_WORTH = 0.92  # a segment fuller than this is not cleaned
_PIECE = 1 << 16
_LOCK = "lock"
_OURS = re.compile(r"[0-9a-f]{16}\.(rows|keys)(\.tmp)?|(store|snapshot)\.json-[0-9a-f]{16}\.tmp")
_open_stores: "weakref.WeakSet[DiskStore]" = weakref.WeakSet()


class DiskError(RuntimeError):
    """The files of a disk store cannot be used; the text names the file and what to do."""


class DiskFull(OSError):
    """There is no room for what was to be written; nothing that was held is lost."""


class DiskStore(Store):
    """Rows in a folder of their own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with DiskStore(folder, {0: Record(2)}) as store:
    ...         store.write(np.array([5]), np.array([[1, 2]], np.float32))
    ...     with DiskStore(folder, {0: Record(2)}) as store:
    ...         out = np.zeros((2, 2), np.float32)
    ...         print(store.read(np.array([4, 5]), out), store.generation)
    [False  True] 1
    """

    def __init__(
        self,
        path: str | Path,
        layout: Layout | Mapping[int, Record],
        *,
        room: float = 1.5,
        files: Files | None = None,
    ) -> None:
        super().__init__(layout)
        if room < 1.3:
            raise ValueError(f"room is {room}: set it to 1.3 or more; the less, the more often rows are written again")
        self.path = Path(path)
        self._files = files or Files()
        self._room = room
        self._gate = Gate()
        self._writing = threading.RLock()
        self._pid = os.getpid()
        self._lock = -1
        self._logs: list[Log] = []
        self._cleaning: tuple[Segment, Iterator[int]] | None = None
        self._changed = False
        _open_stores.add(self)
        try:
            with self._explained():
                self._open()
        except BaseException:
            self._let_go()
            raise
        self._tried = self.generation

    def __repr__(self) -> str:
        return f"DiskStore({str(self.path)!r})"

    # Opening

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise DiskError(f"{self.path} is a file: name a folder, of its own")
        try:
            self._files.make_folder(self.path)
            self._lock = _locked(self.path)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise DiskError(
                f"{self.path} cannot be written to ({error.strerror}): name another folder, or grant the right to write"
            ) from error
        names = os.listdir(self.path)
        others = [name for name in names if name != _LOCK and not _OURS.fullmatch(name)]
        if NAME in others:
            self._load(Manifest.read(self.path / NAME))
        elif others:
            raise DiskError(f"{self.path} holds other files, {others[0]!r} for one: name a new or an empty folder")
        elif any(name.endswith((".rows", ".keys")) for name in names):
            raise Unusable(f"{self.path / NAME} is missing")
        else:
            self._logs = self._empty()
            self._write_manifest(self.identity, 0, self._logs)

    def _empty(self) -> list[Log]:
        return [Log(self.path, record, self._files, self._gate) for record in self.layout.kinds]

    def _load(self, manifest: Manifest) -> None:
        if manifest.layout != self.layout:
            raise DiskError(
                f"{self.path} has records {manifest.layout}, the tables need {self.layout}: open it with the tables and "
                "the optimizer it was made with, or name another folder"
            )
        self._logs = self._empty()
        self._load_logs(self._logs, manifest)
        self.identity, self.generation = manifest.identity, manifest.generation
        # After a kill the rename of the manifest may not last yet, and what it replaced must not go before it does.
        self._files.sync_folder(self.path)
        for log in self._logs:
            log.trim()
        self._remove_strangers()

    def _load_logs(self, logs: list[Log], manifest: Manifest) -> None:
        by_record = {log.record: log for log in logs}
        for entry in manifest.segments:
            by_record[entry.record].load(entry)

    def _remove_strangers(self) -> None:
        """Remove files of ours that belong to no segment: what a kill, or an older point, left behind."""
        known = {p.name for log in self._logs for s in log.segments.values() for p in (s.rows_path, s.keys_path)}
        self._remove_but(self.path, known)

    def _remove_but(self, folder: Path, known: set[str]) -> None:
        for name in os.listdir(folder):
            if _OURS.fullmatch(name) and name not in known:
                self._files.remove(folder / name)

    # Reading and writing

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        with self._explained():
            for start in range(0, keys.size, _PIECE):
                piece = slice(start, start + _PIECE)
                try:
                    with self._gate.lookup():
                        log = self._logs[kind]
                        positions = log.places.locate(keys[piece])
                    log.rows_at(positions, keys[piece], out[piece])
                finally:
                    self._gate.copied()
                found[piece] = positions >= 0

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        """As promised by `Store`. Where it fails, some of the rows may be held: the same call can be made again."""
        try:
            self._write_all(kind, keys, rows)
        except KeyboardInterrupt:
            self._write_all(kind, keys, rows)  # what was begun is finished
            raise

    def _write_all(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        words = rows.reshape(-1).view(np.uint32)
        with self._writing:
            log = self._logs[kind]
            each = words.size // keys.size
            with self._explained(keys.size * log.footprint):
                for start in range(0, keys.size, _PIECE):
                    piece = keys[start : start + _PIECE]
                    self._make_room(log, piece.size)
                    self._changed = True
                    log.append(piece, words[start * each : (start + piece.size) * each])

    def __len__(self) -> int:
        return sum(log.places.count for log in self._logs)

    def keys(self) -> Iterator[NDArray[np.int64]]:
        """As promised by `Store`, in the order of the rows on disk, so that reading them goes through the files once.

        A row written again while it runs may come twice.
        """
        self._check_open()
        for kind in range(len(self._logs)):
            ordinal, start = -1, 0
            while True:
                try:
                    with self._explained(), self._gate.lookup():
                        log = self._logs[kind]
                        segment = next((s for s in log.segments.values() if s.ordinal >= ordinal), None)
                        if segment is None:
                            break
                        start = start if segment.ordinal == ordinal else 0
                        keys, start = log.keys_from(segment, start)
                        ordinal = segment.ordinal if start else segment.ordinal + 1
                finally:
                    self._gate.copied()
                if keys.size:
                    yield keys

    # Room

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all files of rows, garbage included."""
        return sum(log.bytes() for log in self._logs)

    def _limit(self) -> float:
        """What the rows held may take on disk."""
        payload = sum(log.places.count * (log.stride - 4) for log in self._logs)
        stored = sum(log.places.count * log.footprint for log in self._logs)
        return max(self._room * payload, _LEAST_SHARE * stored) + SLACK

    def _make_room(self, log: Log, n: int) -> None:
        """Clean, so that `n` rows more stay within the limit; a little at a time where that will do."""
        coming = n * log.footprint
        limit = self._limit()
        segment = max(log.capacity * log.footprint for log in self._logs)
        start = limit - min(3 * segment, 0.1 * limit)  # two segments may be dead, one be in the midst of being cleaned
        budget = _PACE * n
        while (held := self.bytes_on_disk + coming) > start:
            dead = sum(int(log.ends[s.slot]) * log.footprint for log in self._logs for s in log.dead())
            pressed = held > limit - segment
            if dead >= 2 * segment or (dead and pressed):
                self._point()
            elif held - dead <= start or not (budget > 0 or pressed):
                return
            elif (done := self._clean_some()) is not None:
                budget -= done
            else:
                return

    def _clean_some(self) -> int | None:
        """Clean a piece of a segment; how many records it had, None when there is nothing worth it."""
        if self._cleaning is None:
            victims = [
                (log.used(s), s.ordinal, s, log)
                for log in self._logs
                for s in log.segments.values()
                if s is not log.active and log.live[s.slot]
            ]
            used, _, segment, log = min(victims, default=(1.0, 0, None, None), key=lambda v: v[:2])
            if segment is None or log is None or used > _WORTH:
                return None
            self._cleaning = segment, log.rewrite(segment)
        try:
            done = next(self._cleaning[1], None)
        except BaseException:
            self._cleaning = None
            raise
        if done is None:
            self._cleaning = None
        return done or 0

    # Durable points

    def flush(self) -> None:
        """Make all that was written last: a durable point, with a generation of its own if anything changed."""
        self._check_open()
        with self._writing, self._explained():
            if self._changed:
                self._point()

    def _next_generation(self) -> int:
        # Never twice the same: a point that failed may have reached the disk all the same.
        self._tried = max(self._tried, self.generation) + 1
        return self._tried

    def _point(self) -> None:
        """A durable point; also one that nobody asked for, so that dead segments may go."""
        generation = self._next_generation() if self._changed else self.generation
        self._sync()
        self._commit(generation)

    def _sync(self) -> None:
        """Rows and their files' names last."""
        for log in self._logs:
            log.sync()
        new = [s for log in self._logs for s in log.segments.values() if not s.named]
        if new:
            self._files.sync_folder(self.path)
            for segment in new:
                segment.named = True

    def _commit(self, generation: int) -> None:
        """What was synced is the store's content from now on; dead segments go."""
        self._write_manifest(self.identity, generation, self._logs)
        self.generation, self._changed = generation, False
        gone = [(log, dead) for log in self._logs if (dead := log.dead())]
        if gone:
            names = {s.name for _, dead in gone for s in dead}
            if self._cleaning is not None and self._cleaning[0].name in names:
                self._cleaning = None
            with self._gate.alone():
                for log, dead in gone:
                    log.drop(dead)
            for _, dead in gone:
                self._remove(dead)

    def _remove(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._files.remove(segment.rows_path)
            self._files.remove(segment.keys_path)

    def _write_manifest(self, identity: str, generation: int, logs: list[Log]) -> None:
        manifest = Manifest(identity, generation, self.layout, [entry for log in logs for entry in log.entries()])
        self._replace(self.path, NAME, manifest.sealed())

    def _replace(self, folder: Path, name: str, content: bytes) -> None:
        draft = folder / f"{name}-{secrets.token_hex(8)}.tmp"
        try:
            self._files.put(draft, content)
            self._files.rename(draft, folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove(draft)
            raise
        self._files.sync_folder(folder)

    # Snapshots

    def snapshot(self, folder: str | Path) -> None:
        """As promised by `Store`, and a durable point.

        On the store's own file system the folder shares the store's files: it costs a name for each, and later the
        space of what the store lets go. Elsewhere they are copied; those of an earlier snapshot are not copied again.
        """
        self._check_open()
        folder = Path(folder)
        with self._writing, self._explained():
            if folder.resolve() == self.path.resolve():
                raise ValueError(f"{folder} is the store's own folder: name another one for the snapshot")
            for log in self._logs:
                log.seal()
            self._sync()
            generation = self._next_generation()
            self._share_with(folder, generation)
            self._commit(generation)

    def _share_with(self, folder: Path, generation: int) -> None:
        self._files.make_folder(folder)
        header, added = folder / HEADER, list[Path]()
        before = header.read_bytes() if header.is_file() else None
        entries = [entry for log in self._logs for entry in log.entries()]
        try:
            self._take_over(entries, self.path, folder, added)
            entries = [entry.sized(folder) for entry in entries]
            self._files.sync_folder(folder)
            manifest = Manifest(self.identity, generation, self.layout, entries)
            self._replace(folder, HEADER, manifest.sealed_snapshot())
        except BaseException:
            self._undo(added, header, before)
            raise
        known = {name for entry in entries for name in entry.files()}
        self._remove_but(folder, known)

    def _undo(self, added: list[Path], header: Path, before: bytes | None) -> None:
        """Remove files that were added, unless the header that names them is there already: its rename came through."""
        if (header.read_bytes() if header.is_file() else None) == before:
            for path in added:
                with contextlib.suppress(OSError):
                    self._files.remove(path)

    def _take_over(self, entries: list[Entry], source: Path, target: Path, added: list[Path]) -> None:
        """Segments' files, from one folder to another that may have some of them already."""
        for entry in entries:
            for name, size in entry.least().items():
                if (target / name).is_file() and (target / name).stat().st_size >= size:
                    continue  # names are random, and a name's content only ever grows
                with contextlib.suppress(FileNotFoundError):
                    self._files.remove(target / name)
                added.append(target / name)
                self._files.share(source / name, target / name)

    def restore(self, folder: str | Path) -> None:
        """As promised by `Store`, and a durable point. A snapshot of a `MemoryStore` will do, too.

        Every record is read and checked. Files are shared as `snapshot` does, so it takes no space on disk; the new
        rows' places are in memory beside the old ones' for a moment.
        """
        self._check_open()
        folder = Path(folder)
        snapshot = Snapshot(folder)
        with self._writing, self._explained():
            if snapshot.facts.get("kind") != KIND:
                return self._restore_from_memory(folder, snapshot)
            try:
                manifest = Manifest.from_facts(snapshot.facts)
            except Unusable as error:
                raise SnapshotError(f"{folder / HEADER} {error}: use another snapshot") from None
            self._check_layout(folder, manifest.layout)
            for entry in manifest.segments:
                self._check_sizes(folder, entry.files())
            try:
                with self._replaced_by(manifest.identity, manifest.generation) as (logs, added):
                    self._take_over(manifest.segments, folder, self.path, added)
                    self._load_logs(logs, manifest)
                    for log in logs:
                        for segment in log.segments.values():
                            log.check(segment)
            except Unusable as error:
                text = str(error).replace(f"{self.path}{os.sep}", f"{folder}{os.sep}")
                raise SnapshotError(f"{text}: {error.advice or 'use another snapshot'}") from None

    def _restore_from_memory(self, folder: Path, snapshot: Snapshot) -> None:
        memory = MemoryStore(self.layout)
        memory.restore(folder)
        with self._replaced_by(memory.identity, memory.generation) as (logs, added):
            try:
                for keys in memory.keys():  # noqa: SIM118
                    record = self.layout.records[int(keys[0] >> ROW_BITS)]
                    rows = np.empty((keys.size, record.width), record.dtype)
                    memory.read(keys, rows)
                    logs[self.layout.kinds.index(record)].append(keys, rows.reshape(-1).view(np.uint32))
            finally:
                added += [p for log in logs for s in log.segments.values() for p in (s.rows_path, s.keys_path)]

    @contextlib.contextmanager
    def _replaced_by(self, identity: str, generation: int) -> Iterator[tuple[list[Log], list[Path]]]:
        """Other logs, to be filled in the block, and the paths of their files, to be named there; then the content."""
        logs, added, header = self._empty(), list[Path](), self.path / NAME
        before = header.read_bytes()
        try:
            yield logs, added
            for log in logs:
                log.sync()
            self._files.sync_folder(self.path)
            for log in logs:
                for segment in log.segments.values():
                    segment.named = True
            self._write_manifest(identity, generation, logs)
        except BaseException:
            for log in logs:
                log.close()
            self._undo(added, header, before)
            raise
        with self._gate.alone():
            old, self._logs = self._logs, logs
            self._cleaning, self._changed = None, False
            self.identity, self.generation, self._tried = identity, generation, generation
            for log in old:
                log.close()
        self._remove_strangers()

    def _check_layout(self, folder: Path, layout: Layout) -> None:
        if layout != self.layout:
            raise SnapshotError(
                f"{folder / HEADER} has records {layout}, this store {self.layout}: open it with the same tables"
            )

    def _check_sizes(self, folder: Path, files: Mapping[str, int]) -> None:
        for name, size in files.items():
            path = folder / name
            if not path.is_file():
                raise SnapshotError(f"{path} is missing: use another snapshot, or copy the whole folder again")
            if (found := path.stat().st_size) != size:
                raise SnapshotError(f"{path} has {found:,} bytes, {size:,} were written: use another snapshot")

    def check(self) -> int:
        """Read every record and compare its checksum; how many rows are held. A DiskError names what is damaged."""
        self._check_open()
        with self._writing, self._explained():
            for log in self._logs:
                for segment in log.segments.values():
                    log.check(segment)
        return len(self)

    # Closing

    def close(self) -> None:
        """Flush, then let go of files and memory."""
        if not self.closed:
            try:
                self.flush()
            finally:
                self._let_go()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an exception without a flush, so that the last durable point stays the last."""
        if kind is None:
            self.close()
        else:
            self._let_go()

    def _let_go(self) -> None:
        if not self.closed and os.getpid() == self._pid:  # in a forked child a thread that is not there may hold a lock
            with self._writing, self._gate.alone():
                self.closed = True
                self._cleaning = None
                for log in self._logs:
                    log.close()
                self._logs = []
                if self._lock >= 0:
                    os.close(self._lock)
                self._lock = -1

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._let_go()

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._pid:
            raise ValueError(f"{self!r} was opened by the process that this one was forked from: use it there")

    @contextlib.contextmanager
    def _explained(self, need: int = 0) -> Iterator[None]:
        """Say what to do about damaged files and a full disk."""
        try:
            yield
        except Unusable as error:
            advice = error.advice or "restore a snapshot into a new store, or name an empty folder"
            raise DiskError(f"{error}: {advice}") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskFull):
                raise
            raise DiskFull(error.errno, self._full(need)) from error

    def _full(self, need: int) -> str:
        limit = self._limit() if self._logs else 0
        more = max(need, int(limit + need) - (self.bytes_on_disk if self._logs else 0))
        try:
            free = f"{shutil.disk_usage(self.path).free:,} bytes are free"
        except OSError:
            free = "its free space is not known"
        return (
            f"the disk of {self.path} is full: {free}, and the store needs up to {more:,} more to go on. Nothing is lost; "
            "free that much and try again, or resume on a larger disk from a snapshot"
        )


def _locked(path: Path) -> int:
    """The file that says whose the store is; the system forgets it when its process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        raise DiskError("disk stores need POSIX file locks: set store='memory' on this system") from None
    file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            raise DiskError(f"{path} is in use by {owner}: close it there first, or name another folder") from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def _let_go_in_child() -> None:
    """A forked child shares the lock's file: it would hold the lock after its parent is gone."""
    for store in _open_stores:
        if store._lock >= 0:
            os.close(store._lock)
            store._lock = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
