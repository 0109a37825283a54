"""Frozen rows of a store in memory: new segments, after those of earlier frozen states."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from skirl.store.base import Facts, Frozen, Record
from skirl.store.changes import Taken
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import OsFiles
from skirl.store.disk.segment import SegmentEntry, SegmentWriter


class FrozenRows(Frozen):
    """Rows to be written. `manifest` names the segments that have the others."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        take: Callable[[int], Taken | None],
        release: Callable[[int | None], None],
    ) -> None:
        self._folder, self._manifest = folder, manifest
        self._take, self._release = take, release
        self._written = False

    def write(self) -> Facts:
        files, added = OsFiles(), list[Path]()
        entries = list(self._manifest.segments)
        try:
            for kind, record in enumerate(self._manifest.layout.kinds):
                entries += self._segments(files, kind, record, added)
            files.sync_folder(self._folder)
        except BaseException:
            for path in added:
                with suppress(OSError):
                    files.remove(path)
            raise
        self._written = True
        return replace(self._manifest, segments=entries).facts()

    def _segments(self, files: OsFiles, kind: int, record: Record, added: list[Path]) -> Iterator[SegmentEntry]:
        """Write the rows of a kind, and yield each segment once it is durable."""
        segment: SegmentWriter | None = None
        while (taken := self._take(kind)) is not None:
            keys, rows = taken
            while keys.size:
                if segment is None:
                    segment = SegmentWriter(files, self._folder, record, added)
                n = segment.write(keys, rows)
                keys, rows = keys[n:], rows[n:]
                if keys.size:
                    yield segment.finish()
                    segment = None
        if segment is not None:
            yield segment.finish()

    def release(self) -> None:
        self._release(self._manifest.generation if self._written else None)
