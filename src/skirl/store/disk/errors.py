"""The errors of a disk store, with advice.

Lower layers raise `Unusable` or an OSError of the system, which say what is wrong. This module adds what to do about it.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from skirl.store.disk.segment import Unusable


class DiskError(RuntimeError):
    """The files of a disk store cannot be used. The message names the file and says what to do."""


class DiskFull(OSError):
    """The disk has no room for what was to be written. No row that was held is lost."""

    def __init__(self, text: str, number: int = errno.ENOSPC) -> None:
        super().__init__(text)
        self.errno = number


@contextlib.contextmanager
def explained(path: Path, more: Callable[[], int]) -> Iterator[None]:
    """Turn errors about damaged files or a full disk into ones that say what to do.

    `more` returns how many further bytes the store at `path` may need.
    """
    try:
        yield
    except Unusable as error:
        advice = error.advice or "load a checkpoint into a new store, or name an empty folder"
        raise DiskError(f"{error}: {advice}") from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskFull):
            raise
        raise DiskFull(_full(path, more()), error.errno) from error


def unwritable(path: Path, error: OSError) -> DiskError | OSError:
    """Return what to raise if a folder cannot be used: a DiskError if permission is missing, else the error itself."""
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return error
    return DiskError(f"{path} cannot be written to ({error.strerror}): name another folder, or make it writable")


def _full(path: Path, more: int) -> str:
    try:
        free = f"{shutil.disk_usage(path).free:,} bytes are free"
    except OSError:
        free = "its free space is not known"
    return (
        f"the disk of {path} is full: {free}, and the store needs up to {more:,} more to continue; the rows in it are "
        "intact: free that much or use a larger disk, then resume from a checkpoint"
    )
