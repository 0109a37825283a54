"""A lock that gives a store to one process, and that the system releases however the process ends."""

import os
import socket
import time
import weakref
from pathlib import Path

from skirl.store.disk.errors import DiskError
from skirl.store.disk.os_files import Handle, OsFiles

NAME = "lock"
_ENDING = 2.0
"""Seconds that another process has to end: one that is killed with the process that started it ends a little later."""
_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """An exclusive lock on a folder, held by this process until `release`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = Lock(Path(folder))
    ...     try:
    ...         Lock(Path(folder))
    ...     except DiskError as error:
    ...         print("in use by process" in str(error))
    ...     lock.release()
    ...     Lock(Path(folder)).release()
    True
    """

    def __init__(self, folder: Path) -> None:
        try:
            import fcntl
        except ImportError:
            raise DiskError("disk stores need POSIX file locks: set store='memory' on this system") from None
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

    @property
    def is_there(self) -> bool:
        """True if the locked file is still in the folder: a previous owner may have removed both."""
        try:
            there, mine = os.stat(self._path), os.fstat(self._file.number)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Release the lock."""
        self._file.close()


def _release_in_child() -> None:
    for lock in _held:
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
