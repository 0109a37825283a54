"""Which folders `skirl convert --by session` writes to, and whether they lie apart from what it reads."""

from collections.abc import Iterable
from pathlib import Path

from skirl.data.files.find import would_find

FILE = "part-00000.parquet"
"""What a file is called, for instance."""


def folders_of(out: str) -> tuple[Path, Path]:
    """The folder that is written, and the command's own beside it while it runs.

    **Arguments**

    - `out`: the folder, as a flag says it.

    >>> [str(folder) for folder in folders_of("to/sessions/")]
    ['to/sessions', 'to/sessions.unfinished']
    """
    folder = Path(out)
    if folder.name in ("", ".."):  # . and ..
        folder = folder.resolve()
    if not folder.name:
        raise ValueError(f"out is {out!r}: name a folder in it")
    return folder, folder.with_name(f"{folder.name}.unfinished")


def check_apart(data: str, out: str) -> None:
    """Refuse a folder whose files would be read: by the command, or by the same one when it goes on.

    **Arguments**

    - `data`: as a flag says it, such as parquet:PATH,PATH.
    - `out`: likewise.

    >>> check_apart("parquet:/in/*/*.parquet", "/in/x")
    Traceback (most recent call last):
    ValueError: out is '/in/x', inside of /in/*/*.parquet, which is read: name a folder beside it
    """
    folder, work = (each.resolve() for each in folders_of(out))
    files = [part / FILE for part in (folder, work / "parts")]
    for path in filter(None, map(str.strip, data.partition(":")[2].split(","))):
        own = Path(path).resolve()
        if (own.is_dir() and own in (folder, *folder.parents)) or any(would_find(path, file) for file in files):
            raise ValueError(f"out is {out!r}, inside of {path}, which is read: name a folder beside it")


def check_outside(paths: Iterable[str], out: str) -> None:
    """Refuse a folder that files are read from.

    **Arguments**

    - `paths`: of the files.
    - `out`: as a flag says it.
    """
    folder = Path(out).resolve()
    for path in map(Path, paths):
        if folder in path.resolve().parents:
            raise ValueError(f"out is {out!r}, the folder that {path} is read from: name another")
