"""The logs of a store, one for each kind of record, handled as one.

Tables with equal records share a log: 26 tables of one dim are one file to append to and one to sync. Records of all widths
in one log would be one for any tables, and each would need its width beside it and could not be found by counting.
"""

from collections.abc import Mapping
from pathlib import Path

from skirl.store.base import Layout
from skirl.store.disk.log import Log
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Files
from skirl.store.gate import Gate

KEY_BYTES = 8


def empty(folder: Path, layout: Layout, files: Files, gate: Gate, rows: Mapping[int, int] | None) -> list[Log]:
    """A log for each kind, in their order; rows: of each table, where that is known."""
    logs: list[Log] = []
    for record in layout.kinds:
        of = None if rows is None else {t: rows[t] for t, held in layout.records.items() if held == record}
        logs.append(Log(folder, record, files, gate, of, layout))
    return logs


def load(logs: list[Log], manifest: Manifest) -> None:
    """Take in the segments of an earlier life."""
    for log, count in zip(logs, manifest.rows):
        names = [entry.name for entry in manifest.segments if entry.record == log.record]
        log.index.expect(min(count, _most_keys(log.folder, names)))  # a file may claim any number
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
    """Rows and their files' names last; anew: the names are given by someone else, and count as new."""
    for log in logs:
        log.sync()
    new = [s for log in logs for s in log.segments.values() if anew or not s.named]
    if new:
        files.sync_folder(logs[0].folder)
        for segment in new:
            segment.named = True
