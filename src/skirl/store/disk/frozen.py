"""A disk store at one moment: second names of its sealed segments, in a folder that checkpoints share.

Segments never change, so nothing is copied and nothing has to be set aside while training goes on: what is written after
the moment goes to other segments. What is left for the background is to wait for the disk, through the second names: the
store's own log may let a segment go meanwhile. A copy of the rows would be 20 GB for 20 GB of touched rows, each time.
"""

import contextlib
from dataclasses import replace
from pathlib import Path

from skirl.store.base import Facts, Frozen
from skirl.store.disk.manifest import Manifest
from skirl.store.disk.os_files import Files, Handle


class FrozenSegments(Frozen):
    """added: files that are new in the folder."""

    def __init__(self, files: Files, folder: Path, manifest: Manifest, added: list[Path]) -> None:
        self._files, self._folder, self._manifest, self._added = files, folder, manifest, added
        self._written = False

    def write(self) -> Facts:
        for path in self._added:
            with Handle(self._files, lambda path=path: self._files.open(path)) as file:
                self._files.sync(file.number)
        self._files.sync_folder(self._folder)
        entries = [entry.sized(self._folder) for entry in self._manifest.segments]
        self._written = True
        return replace(self._manifest, segments=entries).facts()

    def release(self) -> None:
        if not self._written:
            for path in self._added:
                with contextlib.suppress(OSError):
                    self._files.remove(path)
