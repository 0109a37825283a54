"""The folders that `skirl convert --by session` writes to, and checks that it does not read from them."""

from collections.abc import Iterable
from pathlib import Path

from skirl.data.files.find import would_find

FILE = "part-00000.parquet"
"""Name of the first file, as an example."""


def folders_of(out: str) -> tuple[Path, Path]:
    """Return the folder to write, and the command's working folder next to it.

    **Arguments**

    - `out`: value of the flag.

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
    """Raise if the command, or the same command when it resumes, would read files that it writes.

    **Arguments**

    - `data`: value of the flag, such as parquet:PATH,PATH.
    - `out`: value of the flag.

    >>> check_apart("parquet:/in/*/*.parquet", "/in/x")
    Traceback (most recent call last):
    ValueError: out is '/in/x', inside /in/*/*.parquet, which is read: name a folder outside it
    """
    folder, work = (each.resolve() for each in folders_of(out))
    files = [part / FILE for part in (folder, work / "parts")]
    for path in filter(None, map(str.strip, data.partition(":")[2].split(","))):
        own = Path(path).resolve()
        if (own.is_dir() and own in (folder, *folder.parents)) or any(would_find(path, file) for file in files):
            raise ValueError(f"out is {out!r}, inside {path}, which is read: name a folder outside it")


def check_outside(paths: Iterable[str], out: str) -> None:
    """Raise if files are read from the output folder.

    **Arguments**

    - `paths`: paths of the files to read.
    - `out`: value of the flag.
    """
    folder = Path(out).resolve()
    for path in map(Path, paths):
        if folder in path.resolve().parents:
            raise ValueError(f"out is {out!r}, the folder that {path} is read from: name another")
