"""The best checkpoint of a run, kept in a folder inside the run's, with which it shares files, because they never change."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from skirl.checkpoint import folder
from skirl.store.disk.os_files import OsFiles
from skirl.tools.sealed_json import CheckpointError, sync_folder, to_disk

NAME = "best"


def keep(header: Path) -> Path:
    """Keep a checkpoint as the best, and return its folder. At every moment, the previous best or this one is complete.

    Files are hard-linked, or copied if the file system has no links.
    """
    own = header.parent / NAME
    try:
        _share(folder.files(folder.read(header)), header.parent, own)
        draft = own / f"{header.name}-{secrets.token_hex(8)}.tmp"
        with draft.open("wb") as file:
            file.write(header.read_bytes())
            to_disk(file)
        os.replace(draft, own / header.name)
        sync_folder(own)
    except BaseException:
        with suppress(OSError):  # the next one sweeps again
            folder.sweep(own)
        raise
    folder.retain(own, folder.number_of(header), 1, None)
    return own


def _share(named: set[str], source: Path, own: Path) -> None:
    """Link or copy all that a header names: the folder of the dense part, and files of rows."""
    files = OsFiles()
    paths = [path for name in sorted(named) for path in _files_of(source / name)]
    for path in paths:
        target = own / path.relative_to(source)
        files.make_folder(target.parent)
        if not (target.is_file() and target.samefile(path)):
            files.share(path, target)
    for parent in {own / path.relative_to(source).parent for path in paths}:
        sync_folder(parent)


def _files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def headers_with_steps(path: Path) -> list[tuple[int, Path]]:
    """Return the readable headers in a folder, newest first, each as (step, header)."""
    found = []
    for number in reversed(folder.numbers(path)):
        header = folder.header(path, number)
        with suppress(CheckpointError, KeyError, TypeError):
            found.append((int(folder.read(header)["run"]["data"]["step"]), header))
    return found
