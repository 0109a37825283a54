"""Share files between a store and its frozen states by hard links, replace them atomically, and remove unneeded ones."""

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from skirl.store.disk.os_files import Handle, OsFiles
from skirl.store.disk.segment import SegmentEntry
from skirl.tools.sealed_json import CheckpointError

OURS = re.compile(r"[0-9a-f]{16}\.(rows|keys)(\.tmp)?|store\.json-[0-9a-f]{16}\.tmp")
"""File names that the store gives, except those of its manifest and its lock."""


def replace(files: OsFiles, folder: Path, name: str, content: bytes) -> None:
    """Replace a header atomically: at every moment the old one or the new one is there, complete."""
    draft = folder / f"{name}-{secrets.token_hex(8)}.tmp"
    try:
        files.put(draft, content)
        files.rename(draft, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(draft)
        raise
    files.sync_folder(folder)


def take_over(
    files: OsFiles,
    entries: list[SegmentEntry],
    source: Path,
    target: Path,
    added: list[Path],
    later: list[tuple[Handle, Path]] | None = None,
) -> None:
    """Link or copy segments' files from one folder to another that may have some of them. Append new paths to `added`.

    A file that is there but too short is replaced by the longer one, and is not `added`: the manifest there may name it.
    With `later`, files that cannot be linked are opened instead of copied, and the caller copies and closes them.
    """
    for entry in entries:
        for name, size in entry.least().items():
            old, new = source / name, target / name
            there = new.is_file()
            if there and new.stat().st_size >= size:
                continue  # names are random, so it is the same file, and files only grow
            if not there:
                added.append(new)
            if files.linked_over(old, new) if there else files.linked(old, new):
                continue
            if later is None:
                files.copy(old, new)
            else:
                later.append((Handle(files, lambda old=old: files.open(old)), new))


def is_shorter(folder: Path, entry: SegmentEntry) -> bool:
    """Return whether a folder has a file of this segment that is shorter than the entry promises."""
    files = {folder / name: size for name, size in entry.least().items()}
    return any(path.is_file() and path.stat().st_size < size for path, size in files.items())


def undo(files: OsFiles, added: list[Path]) -> None:
    """Remove files that were added, ignoring errors."""
    for path in added:
        with contextlib.suppress(OSError):
            files.remove(path)


def remove_but(files: OsFiles, folder: Path, known: set[str]) -> None:
    """Remove all files of ours except those in `known`: leftovers of a kill or of an older durable point."""
    for name in os.listdir(folder):
        if OURS.fullmatch(name) and name not in known:
            files.remove(folder / name)


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise a CheckpointError if a file is missing or has another size."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
        if (found := path.stat().st_size) != size:
            raise CheckpointError(f"{path} has {found:,} bytes, {size:,} were written: use another checkpoint")
