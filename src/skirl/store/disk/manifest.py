"""The manifest: which segments a disk store holds at a durable point, and how much of each; and the files of segments,
which a store and its frozen states share by hard links."""

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skirl.store.base import Layout
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.segment import FORMAT_VERSION, SegmentEntry
from skirl.tools import __version__
from skirl.tools.sealed_json import CheckpointError, read_sealed, seal

NAME = "store.json"
FORMAT = "skirl-disk-store"


OURS = re.compile(r"[0-9a-f]{16}\.(rows|keys)(\.tmp)?|store\.json-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class Manifest:
    identity: str
    generation: int
    layout: Layout
    segments: list[SegmentEntry]
    """The segments kind by kind, in the order of each log."""
    about: dict[str, str] = field(default_factory=dict)
    """The start values of each table's rows: an initialiser and its seed, or the digest of an array."""
    resident: list[SegmentEntry] | None = None
    """For rows of caches: segments whose keys are those of the rows that were there. Other rows in `segments` had left.
    Empty: none had. None: these are rows of a store."""

    def facts(self) -> dict[str, Any]:
        return {
            "segment_format": FORMAT_VERSION,
            "identity": self.identity,
            "generation": self.generation,
            "layout": self.layout.facts(),
            "segments": [entry.to_text() for entry in self.segments],
            **({"begun": self.about} if self.about else {}),
            **({} if self.resident is None else {"resident": [entry.to_text() for entry in self.resident]}),
        }

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Manifest":
        segments, resident = ([*map(SegmentEntry.from_text, facts.get(of, ()))] for of in ("segments", "resident"))
        return cls(
            facts["identity"],
            facts["generation"],
            Layout.from_facts(facts["layout"]),
            segments,
            facts.get("begun", {}),
            resident if "resident" in facts else None,
        )

    def sealed(self) -> bytes:
        head = {"format": FORMAT, "format_version": FORMAT_VERSION, "skirl": __version__}
        return seal(head | {"facts": self.facts()})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        try:
            body = read_sealed(path, format=FORMAT, version=FORMAT_VERSION, what="disk store")
        except CheckpointError as error:
            text, _, advice = str(error).rpartition(": ")
            raise Unusable(text, advice if "version" in advice else "") from None
        return cls.from_facts(body["facts"])


def replace(files: OsFiles, folder: Path, name: str, content: bytes) -> None:
    """Replace a header atomically: at every moment the old one or the new one is there, complete."""
    draft = folder / f"{name}-{secrets.token_hex(8)}.tmp"
    try:
        files.put(draft, content)
        files.rename(draft, folder / name)
    except BaseException:
        with suppress(OSError):
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
    """Link or copy segments' files from one folder to another. Append new paths to `added`, but not those of shorter files,
    which are replaced. With `later`, files that cannot be linked are opened, and the caller copies and closes them."""
    for entry in entries:
        for name, size in entry.files().items():
            old, new = source / name, target / name
            there = new.is_file()
            if there and new.stat().st_size >= size:
                continue  # names are random, so it is the same file, and files only grow
            if not there:
                added.append(new)
            if later is None:
                files.share(old, new)
            elif not files.linked(old, new):
                later.append((files.opened(old), new))


def is_shorter(folder: Path, entry: SegmentEntry) -> bool:
    files = {folder / name: size for name, size in entry.files().items()}
    return any(path.is_file() and path.stat().st_size < size for path, size in files.items())


def undo(files: OsFiles, added: list[Path]) -> None:
    for path in added:
        with suppress(OSError):
            files.remove(path)


def remove_but(files: OsFiles, folder: Path, known: set[str]) -> None:
    """Remove all files of ours except those in `known`: leftovers of a kill or of an older durable point."""
    for name in os.listdir(folder):
        if OURS.fullmatch(name) and name not in known:
            files.remove(folder / name)


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: use another checkpoint, or copy the whole folder again")
        if (found := path.stat().st_size) < size:  # longer: the file of a store that went on before it was killed
            raise CheckpointError(f"{path} has {found:,} bytes, {size:,} were written: use another checkpoint")
