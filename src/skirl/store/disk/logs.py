"""Functions on all logs of a store, of which there is one per kind of record."""

from collections.abc import Mapping
from pathlib import Path

from skirl.store.base import Layout
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import OsFiles
from skirl.store.gate import Gate

KEY_BYTES = 8


def empty(folder: Path, layout: Layout, files: OsFiles, gate: Gate, rows: Mapping[int, int] | None) -> list[Log]:
    """Return an empty log for each kind, in order. `rows`: number of rows of each table, None if unknown."""
    logs: list[Log] = []
    for record in layout.kinds:
        of = None if rows is None else {t: rows[t] for t, held in layout.records.items() if held == record}
        logs.append(Log(folder, record, files, gate, of, layout))
    return logs


def load(logs: list[Log], manifest: Manifest) -> None:
    """Load the segments that a manifest names, after those already there."""
    for log, count in zip(logs, manifest.rows):
        names = [entry.name for entry in manifest.segments if entry.record == log.record]
        log.index.expect(log.index.count + min(count, _most_keys(log.folder, names)))  # a manifest may claim any number
    by_record = {log.record: log for log in logs}
    for entry in manifest.segments:
        by_record[entry.record].load(entry)


def _most_keys(folder: Path, names: list[str]) -> int:
    """Return how many keys the files of these segments can hold at most."""
    found = [folder / f"{name}.keys" for name in names]
    return sum(path.stat().st_size // KEY_BYTES for path in found if path.is_file())


def paths(logs: list[Log]) -> list[Path]:
    """Return the paths of all files of all segments."""
    return [path for log in logs for s in log.segments.values() for path in (s.rows_path, s.keys_path)]


def sync(logs: list[Log], files: OsFiles, *, anew: bool = False) -> None:
    """Wait until rows and the names of their files are durable. `anew`: sync the folder in any case, and count all names
    as new, because they were made by other code.
    """
    for log in logs:
        log.sync()
    new = [s for log in logs for s in log.segments.values() if anew or not s.named]
    if new:
        files.sync_folder(logs[0].folder)
        for segment in new:
            segment.named = True
