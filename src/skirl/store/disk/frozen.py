"""A disk store's rows at one moment: second names of its segments, in a folder that several frozen states share."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, Layout, Rows
from skirl.store.disk import links
from skirl.store.disk import logs as all_logs
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Files, Handle
from skirl.store.disk.segment import SegmentEntry, Unusable
from skirl.store.gate import Gate
from skirl.tools.sealed_json import CheckpointError


class FrozenSegments(Frozen):
    """Segments never change, so nothing is copied or set aside. `write` only waits until the second names last.

    **Arguments**

    - `files`: how to reach the system.
    - `source`: the store's folder.
    - `folder`: the folder that gets the names; it may have some of them. On another file system it gets copies, at once.
    - `manifest`: what the store holds.
    - `unsynced`: segments that this process has not synced. One that was killed may have left a name in the folder, and
      bytes behind the last record, that the disk does not have yet.
    """

    def __init__(
        self, files: Files, source: Path, folder: Path, manifest: Manifest, unsynced: Iterable[str] = ()
    ) -> None:
        self._files, self._folder, self._manifest = files, folder, manifest
        self._unsynced = [folder / f"{name}.{suffix}" for name in unsynced for suffix in ("rows", "keys")]
        self._added: list[Path] = []
        self._written = False
        files.make_folder(folder)
        try:
            links.take_over(files, manifest.segments, source, folder, self._added)
        except BaseException:
            self.release()
            raise

    def write(self) -> Facts:
        for path in dict.fromkeys(self._added + self._unsynced):  # here: the store may let its own names go meanwhile
            with Handle(self._files, lambda path=path: self._files.open(path)) as file:
                self._files.sync(file.number)
        self._files.sync_folder(self._folder)
        entries = [entry.sized(self._folder) for entry in self._manifest.segments]
        self._written = True
        return replace(self._manifest, segments=entries).facts()

    def release(self) -> None:
        if not self._written:
            links.undo(self._files, self._added)


def manifest_of(folder: Path, facts: Facts, layout: Layout) -> Manifest:
    """What a folder holds by these facts; a CheckpointError where a store of this layout cannot take it."""
    try:
        manifest = Manifest.from_facts(facts)
    except Unusable as error:
        raise CheckpointError(f"{folder} {error}: use another checkpoint") from None
    if manifest.layout != layout:
        has, need = manifest.layout.against(layout)
        raise CheckpointError(f"{folder} has records {has}, this store {need}: open it with the same tables")
    return manifest


def take(files: Files, manifest: Manifest, folder: Path, logs: list[Log], added: list[Path]) -> None:
    """Segments of a folder to empty logs, every record read and checked; the files that this adds are named in `added`."""
    for entry in manifest.segments:
        links.check_sizes(folder, entry.files())
        if links.is_shorter(logs[0].folder, entry):
            _check(files, manifest.layout, folder, entry)  # before it replaces what the store's manifest may name
    links.take_over(files, manifest.segments, folder, logs[0].folder, added)
    all_logs.load(logs, manifest)
    for log in logs:
        for segment in log.segments.values():
            log.check(segment)


def _check(files: Files, layout: Layout, folder: Path, entry: SegmentEntry) -> None:
    """Read a segment where it is; an Unusable where it is damaged."""
    log = Log(folder, entry.record, files, Gate(), layout=layout)
    try:
        log.load(entry)
        for segment in log.segments.values():
            log.check(segment)
    finally:
        log.close()


def append(
    logs: list[Log], layout: Layout, pairs: Iterable[tuple[NDArray[np.int64], Rows]], folder: Path, added: list[Path]
) -> None:
    """Rows out of a folder to logs; the files that this adds are named in `added`, also after an error."""
    before = set(all_logs.paths(logs))
    try:
        for keys, rows in pairs:
            if keys.size:
                log = logs[layout.kind(keys, rows)]
                if (beyond := log.beyond(keys)) is not None:
                    raise CheckpointError(f"{folder} does not fit: {beyond}, give the table as many rows as it had")
                log.append(keys, rows.reshape(-1).view(np.uint32))
    finally:
        added += [path for path in all_logs.paths(logs) if path not in before]


@contextmanager
def named(folder: Path, path: Path) -> Iterator[None]:
    """Errors about files that `path` has taken from a folder become those of the folder."""
    try:
        yield
    except Unusable as error:
        text = str(error).replace(f"{path}{os.sep}", f"{folder}{os.sep}")
        raise CheckpointError(f"{text}: {error.advice or 'use another checkpoint'}") from None
