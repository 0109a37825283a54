"""All that the disk store asks of the operating system, in one place, so that a test can stand in between.

What a power loss leaves: the bytes of a file as of its last `sync`, and the names of a folder as of the folder's. Anything
later may be there, in any order, or not. Rows are read by the kernels in `records.py`, which change nothing.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from skirl.tools.interrupts import uninterrupted

_NOT_HERE = (OSError, NotImplementedError)  # no such call, or not on this file system


class Files:
    """Files by descriptor, names by path.

    >>> import tempfile
    >>> files = Files()
    >>> with tempfile.TemporaryDirectory() as folder, Handle(files, lambda: files.create(Path(folder, "a"))) as file:
    ...     files.write(file.number, b"123456", 0)
    ...     files.sync(file.number)
    ...     files.sync_folder(Path(folder))
    ...     print(files.read(file.number, 3, 2))
    b'345'
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, to last."""
        missing = [p for p in (path, *path.parents) if not p.is_dir()]
        for folder in reversed(missing):
            self.make_one_folder(folder)
            self.sync_folder(folder.parent)

    def make_one_folder(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new file, to read and write."""
        return _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, path: Path, *, writable: bool = False) -> int:
        """A file that is there, for reads here and there."""
        file = _opened(path, os.O_RDWR if writable else os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(*_NOT_HERE):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # or each row would bring its neighbours along
        return file

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`; on an error some of it may be there."""
        view = memoryview(data).cast("B")
        while len(view):
            done = os.pwrite(file, view, offset)
            view, offset = view[done:], offset + done

    def read(self, file: int, size: int, offset: int) -> bytes:
        """`size` bytes, fewer at the end of the file."""
        parts: list[bytes] = []
        while size and (part := os.pread(file, size, offset)):
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def send(self, file: int, offset: int, size: int) -> None:
        """Begin to bring bytes to the disk, and wait for nothing."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(*_NOT_HERE):
                # Linux begins to write what is dirty, and then forgets what is clean by now: next to nothing of it.
                os.posix_fadvise(file, offset, size, os.POSIX_FADV_DONTNEED)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """Return when the file's bytes last."""
        os.fsync(file)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names last."""
        with Handle(self, lambda: _opened(path, os.O_RDONLY)) as folder:
            os.fsync(folder.number)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """A second name for a file; an OSError where there is no such thing."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def close(self, file: int) -> None:
        os.close(file)

    # Made of the above.

    def put(self, path: Path, data: bytes) -> None:
        """A new file with this content, to last once its folder is synced."""
        with Handle(self, lambda: self.create(path)) as file:
            self.write(file.number, data, 0)
            self.sync(file.number)

    def copy(self, old: Path, new: Path) -> None:
        """As `put`, from another file; under its name only when whole."""
        with Handle(self, lambda: self.open(old)) as source:
            self.copy_of(source.number, new)

    def copy_of(self, file: int, new: Path) -> None:
        """As `copy`, of a file that is open and need not have a name any more."""
        draft = _draft_of(new)
        with contextlib.suppress(FileNotFoundError):
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
                with contextlib.suppress(OSError):
                    self.remove(draft)
                raise

    def linked(self, old: Path, new: Path) -> bool:
        """Whether the same file has a second name now: not on another file system, nor where there is no such thing."""
        try:
            self.link(old, new)
        except FileExistsError:
            raise
        except _NOT_HERE:
            return False
        return True

    def linked_over(self, old: Path, new: Path) -> bool:
        """As `linked`, over a file that is there: at every moment `new` is the one or the other, whole."""
        draft = _draft_of(new)
        with contextlib.suppress(FileNotFoundError):
            self.remove(draft)
        try:
            self.link(old, draft)
        except _NOT_HERE:
            return False
        self.rename(draft, new)
        return True

    def share(self, old: Path, new: Path) -> None:
        """The same file under a second name where the file system can, else a copy."""
        if not self.linked(old, new):
            self.copy(old, new)

    def share_over(self, old: Path, new: Path) -> None:
        """As `share`, over a file that is there: at every moment `new` is the one or the other, whole."""
        if not self.linked_over(old, new):
            self.copy(old, new)


class Handle:
    """The one owner of a descriptor: nobody else closes it, and it is closed once.

    The system gives the number of a closed file to the next one that is opened. So a Ctrl-C between a close and the line
    that says so must not lead to a second close: it would hit a stranger's file. Here the number is forgotten first, and
    SIGINT waits; another signal's exception can at worst leave a file open until the owner goes.

    >>> files = Files()
    >>> with Handle(files, lambda: os.open(os.devnull, os.O_RDONLY)) as file:
    ...     file.is_open
    True
    >>> file.close(), file.number
    (None, -1)
    """

    __slots__ = ("_files", "number")

    def __init__(self, files: Files, opened: Callable[[], int] | None = None) -> None:
        self._files = files
        self.number = -1
        if opened is not None:
            with uninterrupted():
                self.number = opened()

    @property
    def is_open(self) -> bool:
        """Whether there is a file to use or close."""
        return self.number >= 0

    def close(self) -> None:
        """Let the file go; a second close does nothing."""
        with uninterrupted():
            number, self.number = self.number, -1
            if number >= 0:
                self._files.close(number)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            with contextlib.suppress(OSError):
                self._files.close(number)


def _draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _opened(path: Path, flags: int) -> int:
    """A descriptor. Where this process has no more of them to give, its soft limit is raised to the hard one."""
    flags |= getattr(os, "O_CLOEXEC", 0)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return os.open(path, flags, 0o666)
        except OSError as again:
            raise OSError(again.errno, f"{path}: no file can be opened beside the others, raise `ulimit -n`") from error


_PIECE = 4 << 20
