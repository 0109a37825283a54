"""Starts of a run: a folder of checkpoints belongs to the newest start. One that is older but alive must not change it."""

import os
import re
from contextlib import suppress
from pathlib import Path

from skirl.tools.sealed_json import CheckpointError, sync_folder

_NAME = re.compile(r"start-([0-9]{6,18})")
_DRAFT = re.compile(r"checkpoint-[0-9]{6,18}\.json-[0-9a-f]{16}\.tmp")


class Superseded(CheckpointError):
    """The folder belongs to a newer start of the run, so this one must end."""


def newest(folder: Path) -> int:
    """Return the number of the newest start, or 0 if there was none.

    >>> newest(Path("no such folder"))
    0
    """
    return max([0, *_listed(folder)])


def _listed(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return []


def _file(folder: Path, number: int) -> Path:
    return folder / f"start-{number:06}"


def claim(folder: Path) -> int:
    """Begin a new start by creating its file, and return its number. Two processes at once get different numbers.

    This also removes drafts of headers, so that an older start that has just found itself the newest can no longer rename
    its draft into place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     (claim(Path(folder)), claim(Path(folder)), sorted(os.listdir(folder)))
    (1, 2, ['start-000002'])
    """
    while True:
        number = newest(folder) + 1
        try:
            os.close(os.open(_file(folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            break
        except FileExistsError:
            continue
    sync_folder(folder)
    for name in os.listdir(folder):
        older = _NAME.fullmatch(name)
        if _DRAFT.fullmatch(name) or (older and int(older[1]) < number):
            with suppress(FileNotFoundError):
                os.unlink(folder / name)
    return number


def take_back(folder: Path, start: int | None) -> None:
    """Remove the file of a start that leaves nothing behind."""
    if start is not None:
        _file(folder, start).unlink(missing_ok=True)


def is_newest(folder: Path, start: int | None) -> bool:
    """Return whether a start may still change the folder.

    A network file system may list names as they were some seconds ago, but does not open a file that is gone. So this opens
    the start's own file, which a newer start removes.
    """
    if start is None:
        return True
    there = _listed(folder)
    if max([0, *there]) > start:
        return False
    try:
        os.close(os.open(_file(folder, start), os.O_RDONLY))
    except FileNotFoundError:
        return start not in there  # no start is there: someone has cleared the folder
    return True


def check(folder: Path, start: int | None) -> None:
    """Raise a Superseded if the folder belongs to a newer start of the run."""
    if not is_newest(folder, start):
        number = newest(folder)
        whose = f"start {number}" if number != start else "a newer start"
        raise Superseded(
            f"{folder} belongs to {whose} of the run, and this is start {start}: end this one, nothing of it "
            "is saved any more"
        )
