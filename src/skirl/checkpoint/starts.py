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
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    return max([0, *(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))])


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
            os.close(os.open(folder / f"start-{number:06}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
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

    **Arguments**

    - `folder`: of checkpoints.
    - `start`: the number that `claim` gave.
    """
    return start is None or newest(folder) <= start


def check(folder: Path, start: int | None) -> None:
    """Refuse what an older start of the run would do.

    **Arguments**

    - `folder`: of checkpoints.
    - `start`: the number that `claim` gave.
    """
    if not is_newest(folder, start):
        raise Superseded(
            f"{folder} belongs to start {newest(folder)} of the run, and this is start {start}: end this one, nothing of it "
            "is saved any more"
        )
