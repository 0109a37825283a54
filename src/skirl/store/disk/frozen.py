"""A disk store's rows at one moment: hard links to its segments, in a folder that several frozen states share."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, FrozenPart, Layout, Rows
from skirl.store.disk import log as all_logs
from skirl.store.disk import manifest as manifests
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.segment import SegmentEntry
from skirl.store.gate import Gate
from skirl.tools.sealed_json import CheckpointError


class FrozenSegments(Frozen):
    """Frozen segments. They never change, so they are hard-linked. `write` copies what cannot be linked, and syncs."""

    def __init__(
        self, files: OsFiles, source: Path, folder: Path, manifest: Manifest, unsynced: Iterable[str] = ()
    ) -> None:
        self._files, self._folder, self._manifest = files, folder, manifest
        self._unsynced = [folder / f"{name}.{suffix}" for name in unsynced for suffix in ("rows", "keys")]
        self._added: list[Path] = []
        self._later: list[tuple[Handle, Path]] = []
        self._written = False
        files.make_folder(folder)
        try:
            manifests.take_over(files, manifest.segments, source, folder, self._added, self._later)
        except BaseException:
            self.release()
            raise

    def write(self) -> Facts:
        for source, path in self._later:
            self._files.copy_of(source.number, path)
            source.close()
        for path in dict.fromkeys(self._added + self._unsynced):  # these: the store may unlink its own meanwhile
            with Handle(self._files, lambda path=path: self._files.open(path)) as file:
                self._files.sync(file.number)
        self._files.sync_folder(self._folder)
        entries = [entry.sized(self._folder) for entry in self._manifest.segments]
        self._written = True
        return replace(self._manifest, segments=entries).facts()

    def release(self) -> None:
        for source, _ in self._later:
            source.close()
        if not self._written:
            manifests.undo(self._files, self._added)


def manifest_of(folder: Path, facts: Facts, layout: Layout | None = None) -> Manifest:
    """Return the manifest of frozen rows. Raise a CheckpointError if they do not fit the layout."""
    try:
        manifest = Manifest.from_facts(facts)
    except Unusable as error:
        raise CheckpointError(f"{folder} {error}: use another checkpoint") from None
    if layout is not None and manifest.layout != layout:
        has, need = manifest.layout.against(layout)
        raise CheckpointError(f"{folder} has records {has}, this store {need}: open it with the same tables")
    return manifest


def check_files(folder: Path, facts: Facts) -> None:
    """Raise a CheckpointError if a file of frozen rows is missing or has another size."""
    for entry in manifest_of(folder, facts).segments:
        manifests.check_sizes(folder, entry.files())


def take(
    files: OsFiles, parts: Iterable[FrozenPart], layout: Layout, folder: Path, logs: list[Log], added: list[Path]
) -> None:
    """Take the rows of a folder into empty logs, checking every record. List files that this adds in `added`, even if it
    fails.
    """
    laid: list[Iterable[tuple[NDArray[np.int64], Rows]]] = []
    for part in parts:  # shared segments first: what is appended must come after them
        if part.shard is None:
            _share(files, manifest_of(folder, part.facts, layout), folder, logs, added)
        else:
            laid.append(part.own(rows_of(files, part, layout, folder)))
        laid.append(part.own(part.over))
    for pairs in laid:
        _append(logs, layout, pairs, folder, added)


def rows_of(files: OsFiles, part: FrozenPart, layout: Layout, folder: Path) -> Iterator[tuple[NDArray[np.int64], Rows]]:
    """Yield the rows of a part that are to be taken, in the order in which later ones replace earlier ones."""
    for entry in manifest_of(folder, part.facts, layout).segments:
        manifests.check_sizes(folder, entry.files())
        with _opened(files, layout, folder, entry) as log:
            for keys, words in log.scan(entry):
                if (at := layout.stranger(keys, entry.record)) >= 0:
                    raise CheckpointError(
                        f"{folder / entry.name}.keys: key {keys[at]} does not fit: use another checkpoint"
                    )
                yield keys, words.view(entry.record.dtype).reshape(keys.size, entry.record.width)


def _share(files: OsFiles, manifest: Manifest, folder: Path, logs: list[Log], added: list[Path]) -> None:
    """Link or copy whole segments of a folder into the logs, and check them."""
    for entry in manifest.segments:
        manifests.check_sizes(folder, entry.files())
        if manifests.is_shorter(logs[0].folder, entry):
            with _opened(files, manifest.layout, folder, entry) as log:
                log.load(entry)
                for segment in log.segments.values():
                    log.check(segment)  # before it replaces what the store's manifest may name
    manifests.take_over(files, manifest.segments, folder, logs[0].folder, added)
    all_logs.load(logs, manifest)
    names = {entry.name for entry in manifest.segments}
    for log in logs:
        for segment in log.segments.values():
            if segment.name in names:
                log.check(segment)


@contextmanager
def _opened(files: OsFiles, layout: Layout, folder: Path, entry: SegmentEntry) -> Iterator[Log]:
    """Return a log of its own for one segment where it is."""
    log = Log(folder, entry.record, files, Gate(), layout)
    try:
        yield log
    finally:
        log.close()


def _append(
    logs: list[Log], layout: Layout, pairs: Iterable[tuple[NDArray[np.int64], Rows]], folder: Path, added: list[Path]
) -> None:
    """Append rows of a folder to the logs. List files that this adds in `added`, even if it fails."""
    before = set(all_logs.paths(logs))
    try:
        for keys, rows in pairs:
            if keys.size:
                log = logs[layout.kind(keys, rows)]
                if (beyond := log.index.beyond(keys)) is not None:
                    raise CheckpointError(f"{folder} does not fit: {beyond}, give the table as many rows as it had")
                log.append(keys, rows.reshape(-1).view(np.uint32))
    finally:
        added += [path for path in all_logs.paths(logs) if path not in before]


@contextmanager
def named(folder: Path, path: Path) -> Iterator[None]:
    """Turn errors about files that `path` took from a folder into errors about the files in that folder."""
    try:
        yield
    except Unusable as error:
        text = str(error).replace(f"{path}{os.sep}", f"{folder}{os.sep}")
        raise CheckpointError(f"{text}: {error.advice or 'use another checkpoint'}") from None
