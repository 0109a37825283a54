"""Which start of a run a folder of checkpoints belongs to: the newest. An older one that lives on changes nothing in it."""

import os
import re
from contextlib import suppress
from pathlib import Path

from skirl.tools.sealed_json import CheckpointError, sync_folder

_NAME = re.compile(r"start-([0-9]{6,18})")
_DRAFT = re.compile(r"checkpoint-[0-9]{6,18}\.json-[0-9a-f]{16}\.tmp")


class Superseded(CheckpointError):
    """The folder belongs to a newer start of the run: this one has to end."""


def newest(folder: Path) -> int:
    """The number of the newest start; 0 where there was none.

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
    """Begin a start, newer than all before it, by a file; of two that ask at once each gets a number of its own.

    Drafts of headers go then: an older start that has found itself the newest, and did not rename its draft yet, has
    nothing to rename any more.

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


def is_newest(folder: Path, start: int | None) -> bool:
    """Whether a start may still change the folder; None: of a folder without starts.

    A file system of other machines may show names as they were some seconds ago, and opens no file that is gone: so the
    start's own file is opened, which a newer one removes.

    **Arguments**

    - `folder`: of checkpoints.
    - `start`: the number that `claim` gave.
    """
    if start is None:
        return True
    there = _listed(folder)
    if max([0, *there]) > start:
        return False
    try:
        os.close(os.open(_file(folder, start), os.O_RDONLY))
    except FileNotFoundError:
        return start not in there  # neither it nor a newer one: someone has cleared the folder
    return True


def check(folder: Path, start: int | None) -> None:
    """Refuse what an older start of the run would do.

    **Arguments**

    - `folder`: of checkpoints.
    - `start`: the number that `claim` gave.
    """
    if not is_newest(folder, start):
        number = newest(folder)
        whose = f"start {number}" if number != start else "a newer start"
        raise Superseded(
            f"{folder} belongs to {whose} of the run, and this is start {start}: end this one, nothing of it "
            "is saved any more"
        )
