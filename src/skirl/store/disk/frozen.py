"""Frozen rows in a folder that several frozen states share: hard links to segments of a store on disk, or segments written
for them."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.core.keys import table_of
from skirl.store.base import Facts, Frozen, FrozenPart, Layout, Pairs, Record
from skirl.store.disk import log as all_logs
from skirl.store.disk import manifest as manifests
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import FORMAT_VERSION, Manifest, SegmentEntry, read_keys, write_segments
from skirl.store.disk.os_files import Handle, OsFiles, Unusable
from skirl.store.disk.records import INDEX_BITS
from skirl.tools.sealed_json import CheckpointError
from skirl.tools.threads import Gate

_WORTH = 2
"""Most bytes of frozen files per byte of rows held in memory. Beyond that, all rows are written again."""
_MANY = 500
"""Most segments of frozen files beyond those that the rows held would fill. A store on disk takes some 4,000 of a kind."""


def freeze_segments(
    files: OsFiles, source: Path, folder: Path, manifest: Manifest, unsynced: Iterable[str] = ()
) -> Frozen:
    """Freeze segments by hard links, since they never change. `write` copies what cannot be linked, and syncs."""
    added, later, written = list[Path](), list[tuple[Handle, Path]](), list[bool]()

    def write() -> Facts:
        for file, path in later:
            files.copy_of(file.number, path)
            file.close()
        names = [folder / f"{name}.{suffix}" for name in unsynced for suffix in ("rows", "keys")]
        for path in dict.fromkeys(added + names):  # these: the store may unlink its own meanwhile
            with files.opened(path) as file:
                files.sync(file.number)
        files.sync_folder(folder)
        written.append(True)
        return manifest.facts()

    def release() -> None:
        for file, _ in later:
            file.close()
        if not written:
            manifests.undo(files, added)

    files.make_folder(folder)
    try:
        manifests.take_over(files, manifest.segments, source, folder, added, later)
    except BaseException:
        release()
        raise
    return Frozen(write, release)


def worth_keeping(before: list[SegmentEntry], kinds: Iterable[tuple[Record, int]]) -> list[SegmentEntry]:
    """Return the segments on which the next frozen state may build: all or none. `kinds`: how many rows of each are held."""
    counts = list(kinds)
    held = sum(count * (record.nbytes + 8) for record, count in counts)
    most = _MANY + (sum(count for _, count in counts) >> INDEX_BITS)
    written = sum(sum(entry.files().values()) for entry in before)
    return before if written <= _WORTH * held and len(before) <= most else []


def write_frozen(
    folder: Path, manifest: Manifest, kinds: Iterable[tuple[Record, Pairs]], resident: NDArray[np.int64] | None = None
) -> Facts:
    """Write rows to new segments after those of a manifest. Return the facts of all once they are durable.

    `resident`: for rows of caches, the keys of all rows that are there.
    """
    files, added, entries, keys = OsFiles(), list[Path](), list(manifest.segments), list[SegmentEntry]()
    try:
        if resident is not None and entries:  # else the rows written now are all that are there
            nothing = np.broadcast_to(np.float32(0), (len(resident), 1))
            keys += write_segments(files, folder, Record(1), iter([(resident, nothing)]), added)
        for record, pairs in kinds:
            entries += write_segments(files, folder, record, pairs, added)
        files.sync_folder(folder)
    except BaseException:
        manifests.undo(files, added)
        raise
    return replace(manifest, segments=entries, resident=None if resident is None else keys).facts()


def manifest_of(folder: Path, facts: Facts, layout: Layout | None = None) -> Manifest:
    """Return the manifest of frozen rows. Raise a CheckpointError if they do not fit the layout."""
    if facts["segment_format"] != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has rows in format {facts['segment_format']}: use another checkpoint")
    manifest = Manifest.from_facts(facts)
    there = _narrowed(manifest.layout, facts)
    if layout is not None and there != _without(layout, facts):
        has, need = there.against(_without(layout, facts))
        raise CheckpointError(f"{folder} has records {has}, this store {need}: open it with the same tables")
    return manifest


def _without(layout: Layout, facts: Facts) -> Layout:
    """Leave out tables whose rows are not taken from here, since trainers have cut them by columns."""
    cut = facts.get("without", ())
    return Layout({t: of for t, of in layout.records.items() if t not in cut}) if cut else layout


def _narrowed(layout: Layout, facts: Facts) -> Layout:
    """Keep what a variant of a sweep has in the records of all: `columns` are table, first number, how many."""
    layout = _without(layout, facts)
    if (columns := facts.get("columns")) is None:
        return layout
    own = [(table, width) for table, _, width in columns if table in layout.records]
    return Layout({table: Record(width, layout.records[table].dtype) for table, width in own})


def check_files(folder: Path, facts: Facts) -> None:
    """Raise a CheckpointError if a file of frozen rows is missing or too short."""
    manifest = manifest_of(folder, facts)
    for entry in [*manifest.segments, *(manifest.resident or [])]:
        manifests.check_sizes(folder, entry.files())


def check_rows(folder: Path, facts: Facts, layout: Layout | None = None) -> None:
    """Raise a CheckpointError if a record of frozen rows is not as it was written, or not of the layout."""
    with named(folder, folder):
        deque(rows_of(FrozenPart(facts), folder, layout), maxlen=0)


def keys_of(folder: Path, facts: Facts) -> list[NDArray[np.int64]]:
    manifest = manifest_of(folder, facts)
    return [read_keys(folder, entry) for entry in manifest.resident or manifest.segments]


def take(
    files: OsFiles, parts: Iterable[FrozenPart], layout: Layout, folder: Path, logs: list[Log], added: list[Path]
) -> None:
    """Take the rows of a folder into empty logs, checking every record. List files that this adds in `added`, even if it
    fails.
    """
    laid: list[Pairs] = []
    for part in parts:  # shared segments first: what is appended must come after them
        manifest = manifest_of(folder, part.facts, layout)
        if part.shard is None and not manifest.resident and "columns" not in part.facts:
            _share(files, manifest, folder, logs, added)
        else:
            laid.append(rows_of(part, folder, layout))
    before = set(all_logs.paths(logs))
    try:
        for keys, rows in chain(*laid):
            log = logs[layout.kind(keys, rows)]
            if (beyond := log.index.beyond(keys)) is not None:
                raise CheckpointError(f"{folder} does not fit: {beyond}, give the table as many rows as it had")
            log.append(keys, rows.reshape(-1).view(np.uint32))
    finally:
        added += [path for path in all_logs.paths(logs) if path not in before]


def rows_of(part: FrozenPart, folder: Path, layout: Layout | None = None) -> Pairs:
    """Yield the rows of a part that are to be taken, in the order in which later ones replace earlier ones."""
    manifest, columns = manifest_of(folder, part.facts, layout), part.facts.get("columns")
    resident = [keys for entry in manifest.resident or [] for keys, _ in _scan(manifest, folder, entry)]
    known = np.sort(np.concatenate([*resident, [-1]])) if resident else None
    for entry in manifest.segments:
        for keys, words in _scan(manifest, folder, entry):
            rows = words.view(entry.record.dtype).reshape(keys.size, entry.record.width)
            here = np.ones(keys.size, np.bool_) if part.shard is None else part.shard(keys)
            if known is not None:
                here &= known[np.searchsorted(known, keys, "right") - 1] == keys
            if columns is None and here.any():
                yield (keys, rows) if here.all() else (keys[here], rows[here])
            for begin, width in sorted({(begin, width) for _, begin, width in columns or ()}):
                own = here & np.isin(table_of(keys), [table for table, *at in columns or () if at == [begin, width]])
                if own.any():
                    yield keys[own], np.ascontiguousarray(rows[own, begin : begin + width])


def _scan(manifest: Manifest, folder: Path, entry: SegmentEntry) -> Iterator[tuple[NDArray[np.int64], Any]]:
    manifests.check_sizes(folder, entry.files())
    log = Log(folder, entry.record, OsFiles(), Gate(), manifest.layout)
    try:
        yield from log.scan(entry)
    finally:
        log.close()


def _share(files: OsFiles, manifest: Manifest, folder: Path, logs: list[Log], added: list[Path]) -> None:
    for entry in manifest.segments:
        if manifests.is_shorter(logs[0].folder, entry):
            deque(_scan(manifest, folder, entry), maxlen=0)  # before it replaces what the store may need
        else:
            manifests.check_sizes(folder, entry.files())
    manifests.take_over(files, manifest.segments, folder, logs[0].folder, added)
    all_logs.load(logs, manifest)
    names = {entry.name for entry in manifest.segments}
    for log in logs:
        for segment in log.segments.values():
            if segment.name in names:
                deque(log.records_of(segment), maxlen=0)


@contextmanager
def named(folder: Path, path: Path) -> Iterator[None]:
    """Turn errors about files that `path` took from a folder into errors about the files in that folder."""
    try:
        yield
    except Unusable as error:
        text = str(error).replace(f"{path}{os.sep}", f"{folder}{os.sep}")
        raise CheckpointError(f"{text}: {error.advice or 'use another checkpoint'}") from None
