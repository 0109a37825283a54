"""Errors of the system in words, without their numbers and without names of drafts."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_WORDS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file may not become that large here (ulimit -f)",
    errno.EMFILE: "this process has too many files open (ulimit -n)",
}
ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that go away once there is more room."""
_IN_TEXT = re.compile(r"(?:os error |[Ee]rrno )(\d+)")
_DRAFT = re.compile(r"(-[0-9a-f]{16}\.tmp|\.new|\.tmp|\.\d+\.part)$")


class NotWritten(OSError):
    """A file could not be written; the text says which one, why, and what to do."""

    def __init__(self, text: str, number: int | None = None) -> None:
        super().__init__(text)
        self.errno = number


def of_system(error: BaseException) -> OSError | None:
    """Return the system's error behind one: itself, or the one that a library turned into text. None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if type(error).__module__.startswith("skirl."):  # its text is a sentence
        return error if isinstance(error, OSError) else None
    if (found := _IN_TEXT.search(str(error))) is not None:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    if "PytorchStreamWriter failed" in str(error):  # torch.save does not say why
        return OSError(errno.EIO, os.strerror(errno.EIO))
    return error if isinstance(error, OSError) else None


def why(error: BaseException) -> str:
    """Return why the system refused.

    >>> why(OSError(errno.EROFS, "Read-only file system", "runs/x.tmp"))
    'read-only file system'
    """
    found = of_system(error)
    if found is None:
        text = str(error)
        return f"{type(error).__name__}: {text}" if text else type(error).__name__
    if found.errno is None or found.strerror is None:  # a sentence already
        return str(found)
    return _WORDS.get(found.errno) or found.strerror[:1].lower() + found.strerror[1:]


def said(error: BaseException) -> str:
    """Return an error as a command reports it: a file that the system names comes before the reason."""
    if not isinstance(error, OSError):
        return str(error)
    name = None if error.filename is None else _DRAFT.sub("", os.fsdecode(error.filename))
    return why(error) if name is None else f"{name}: {why(error)}"


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise a `NotWritten` that names the file if the system refuses something in this block."""
    try:
        yield
    except Exception as error:
        found = of_system(error)
        if found is None or isinstance(error, NotWritten):
            raise
        then = "free some room, or name another place" if found.errno in ROOM else "name a place that can be written to"
        raise NotWritten(f"{path} could not be written, {why(found)}: {then}", found.errno) from error


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A draft to write in this block, which then takes the place of a file; if the block raises, it is removed."""
    place = Path(path)  # drops a trailing slash
    draft = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        with writing(path):
            draft.touch()
            mode = draft.stat().st_mode
        yield draft
        with writing(path):
            draft.chmod(mode)  # safetensors writes for the owner alone
            os.replace(draft, place)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
