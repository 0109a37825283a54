"""Calls to the system that a store on disk makes, its lock, and what their errors mean."""

import errno
import fcntl
import os
import resource
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skirl.tools.os_errors import why


class Unusable(Exception):
    """Files that cannot be used as they are. The message says which and why; whoever catches it adds what to do."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


class DiskError(RuntimeError):
    """The files of a disk store cannot be used. The message names the file and says what to do."""


class DiskFull(OSError):
    """The disk has no room for what was to be written. No row that was held is lost."""

    def __init__(self, text: str, number: int = errno.ENOSPC) -> None:
        super().__init__(text)
        self.errno = number


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors about damaged files or a full disk, of the store at `path`, into ones that say what to do."""
    try:
        yield
    except Unusable as error:
        advice = error.advice or "load a checkpoint into a new store, or name an empty folder"
        raise DiskError(f"{error}: {advice}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskFull):
            raise
        raise DiskFull(
            f"{path} could not be written, {why(error)}; the rows in it are intact: free some room or use a larger "
            "disk, then resume from a checkpoint",
            error.errno,
        ) from error


class OsFiles:
    """Files by descriptor, names by path."""

    def make_folder(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.is_dir()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # other trainers may do this at once
                self.make_one_folder(folder)
            self.sync_folder(folder.parent)

    def make_one_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        return _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, path: Path, *, writable: bool = False) -> int:
        file = _opened(path, os.O_RDWR if writable else os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # else reads would also fetch neighbours
        return file

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            done = os.pwrite(file, view, offset)
            view, offset = view[done:], offset + done

    def read(self, file: int, size: int, offset: int) -> bytes:
        data = b""
        while len(data) < size and (part := os.pread(file, size - len(data), offset + len(data))):
            data += part
        return data

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        with Handle(self, lambda: _opened(path, os.O_RDONLY)) as folder:
            os.fsync(folder.number)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def close(self, file: int) -> None:
        os.close(file)

    # Built from the calls above.

    def opened(self, path: Path, *, writable: bool = False) -> "Handle":
        return Handle(self, lambda: self.open(path, writable=writable))

    def put(self, path: Path, data: bytes) -> None:
        """Create a file with this content, which is durable once its folder is synced."""
        with Handle(self, lambda: self.create(path)) as file:
            self.write(file.number, data, 0)
            self.sync(file.number)

    def copy_of(self, file: int, new: Path) -> None:
        """Copy an open file, which may be unlinked by now. The new name appears once the copy is durable."""
        draft = _draft_of(new)
        with suppress(FileNotFoundError):
            self.remove(draft)
        with Handle(self, lambda: self.create(draft)) as target:
            try:
                offset = 0
                while part := self.read(file, _PIECE, offset):
                    self.write(target.number, part, offset)
                    offset += len(part)
                self.sync(target.number)
                self.rename(draft, new)
            except BaseException:
                with suppress(OSError):
                    self.remove(draft)
                raise

    def linked(self, old: Path, new: Path) -> bool:
        """Try to make a hard link, and return whether that worked. An existing file is replaced atomically."""
        there = new.exists()
        path = _draft_of(new) if there else new
        with suppress(OSError):
            if there:
                with suppress(FileNotFoundError):
                    self.remove(path)
            self.link(old, path)
            if there:
                self.rename(path, new)
            return True
        return False

    def share(self, old: Path, new: Path) -> None:
        """Make a hard link if the file system can, else a copy. An existing file is replaced as by `linked`."""
        if not self.linked(old, new):
            with self.opened(old) as source:
                self.copy_of(source.number, new)


class Handle:
    """The only owner of a descriptor: nobody else closes it, and it is closed once, also by a Ctrl-C: a second close would
    hit the next file that got the number, so the number is forgotten first."""

    __slots__ = ("_files", "number")

    def __init__(self, files: OsFiles, opened: Callable[[], int] | None = None) -> None:
        self._files = files
        self.number = -1
        if opened is not None:
            self.number = opened()

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            self._files.close(number)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


def _draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _opened(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. If this process has none left, raise its soft limit to the hard one first."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if error.errno != errno.EMFILE:
            raise
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


_PIECE = 4 << 20


NAME = "lock"
_ENDING = 2.0
"""Seconds that another process has to end: one that is killed with the process that started it ends a little later."""
_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """An exclusive lock on a folder, held by this process until `release`."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._path = folder / NAME
        self._file = Handle(OsFiles(), lambda: os.open(self._path, flags, 0o666))
        _held.add(self)
        own, until = f"process {os.getpid()} on {socket.gethostname()}", time.monotonic() + _ENDING
        try:
            while True:
                try:
                    fcntl.flock(self._file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    owner = os.pread(self._file.number, 200, 0).decode(errors="replace") or "another process"
                    if owner == own or time.monotonic() > until:
                        raise DiskError(
                            f"{folder} is in use by {owner}: close it there first, or name another folder"
                        ) from None
                    time.sleep(0.01)
            os.ftruncate(self._file.number, 0)
            os.pwrite(self._file.number, own.encode(), 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._file.close()


def _release_in_child() -> None:
    for lock in _held:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
