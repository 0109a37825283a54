"""Rows of stores of different kinds, in one checkpoint."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import MEMORY_ROWS, Facts, Frozen, FrozenPart, Layout
from skirl.store.disk.frozen import rows_of
from skirl.store.disk.os_files import OsFiles
from skirl.store.disk.store import DiskStore
from skirl.store.memory.frozen import frozen_rows


class AsSegments(Frozen):
    """The frozen rows of a site in memory, written as those of a disk store. All rows are written, and twice."""

    def __init__(self, frozen: Frozen, folder: Path, layout: Layout) -> None:
        self._frozen, self._folder, self._layout = frozen, folder, layout

    def write(self) -> Facts:
        """Write them as segments."""
        facts, made = self._frozen.write(), self._folder.parent / f"site-{secrets.token_hex(8)}"
        try:
            with DiskStore(made, self._layout) as store:
                for keys, rows in frozen_rows(self._folder, facts, self._layout):
                    whole: Any = np.ascontiguousarray(rows)
                    store.write(np.ascontiguousarray(keys), whole)
                segments = store.freeze(self._folder, None)
                try:
                    written = segments.write()
                finally:
                    segments.release()
        finally:
            shutil.rmtree(made, ignore_errors=True)
            for entry in facts["files"]:
                (self._folder / entry["file"]).unlink(missing_ok=True)
        return written | {"identity": facts["identity"], "generation": facts["generation"]}

    def release(self) -> None:
        """See `Frozen.release`."""
        self._frozen.release()


def in_memory(part: FrozenPart, folder: Path, layout: Layout) -> FrozenPart:
    """Return a part that a site in memory can take, whichever kind of store froze it. Rows on disk are read when needed."""
    if part.facts.get("kind") == MEMORY_ROWS:
        return part
    named = {name: part.facts[name] for name in ("identity", "generation")}
    return FrozenPart(
        {"kind": MEMORY_ROWS, **named, "layout": layout.facts(), "files": []}, _read(part, folder, layout)
    )


def _read(part: FrozenPart, folder: Path, layout: Layout) -> Iterator[tuple[NDArray[np.int64], Any]]:
    yield from rows_of(OsFiles(), part, layout, folder)
    yield from part.own(part.over)
