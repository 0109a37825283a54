"""The logs of a store, one for each kind of record, handled as one."""

from collections.abc import Mapping
from pathlib import Path

from skirl.store.base import Layout
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Files
from skirl.store.gate import Gate

KEY_BYTES = 8


def empty(folder: Path, layout: Layout, files: Files, gate: Gate, rows: Mapping[int, int] | None) -> list[Log]:
    """A log for each kind, in their order; rows: how many each table has, None where that is not known."""
    logs: list[Log] = []
    for record in layout.kinds:
        of = None if rows is None else {t: rows[t] for t, held in layout.records.items() if held == record}
        logs.append(Log(folder, record, files, gate, of, layout))
    return logs


def load(logs: list[Log], manifest: Manifest) -> None:
    """Take in the segments that a manifest names, behind those that are there."""
    for log, count in zip(logs, manifest.rows):
        names = [entry.name for entry in manifest.segments if entry.record == log.record]
        log.index.expect(log.index.count + min(count, _most_keys(log.folder, names)))  # a file may claim any number
    by_record = {log.record: log for log in logs}
    for entry in manifest.segments:
        by_record[entry.record].load(entry)


def _most_keys(folder: Path, names: list[str]) -> int:
    """As many keys as the files of these segments could hold."""
    found = [folder / f"{name}.keys" for name in names]
    return sum(path.stat().st_size // KEY_BYTES for path in found if path.is_file())


def paths(logs: list[Log]) -> list[Path]:
    """All files of all segments."""
    return [path for log in logs for s in log.segments.values() for path in (s.rows_path, s.keys_path)]


def sync(logs: list[Log], files: Files, *, anew: bool = False) -> None:
    """Wait until rows and the names of their files last; anew: others gave the names, so all of them count as new."""
    for log in logs:
        log.sync()
    new = [s for log in logs for s in log.segments.values() if anew or not s.named]
    if new:
        files.sync_folder(logs[0].folder)
        for segment in new:
            segment.named = True
