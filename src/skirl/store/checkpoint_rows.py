"""The rows of a checkpoint, for reading: where they lie, in files that stay as they are."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import DISK_ROWS, Facts, Frozen, Layout, Record, Rows, Store, at_once
from skirl.store.disk.store import DiskStore
from skirl.store.frozen import Part
from skirl.store.memory.mapped import MappedRows

log = logging.getLogger("skirl")


class CheckpointRows(Store):
    """What `store="checkpoint"` makes: it is empty until `skirl.load` has it take a checkpoint's rows, and refuses writes.

    Rows of a memory store are mapped, not copied. Those of a disk store get second names in a folder beside the
    checkpoint, which goes with the store; where that folder may not be written to, copies in the system's folder for
    temporary files.

    **Arguments**

    - `layout`: the records of each table; a mapping will do.
    - `rows`: how many rows each table has, as for a disk store.
    """

    read_only = True

    def __init__(self, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None) -> None:
        super().__init__(layout)
        self._table_rows = rows
        self._mapped: MappedRows | None = None
        self._disk: DiskStore | None = None
        self._folder: TemporaryDirectory[str] | None = None

    @property
    def ready(self) -> bool:
        """Whether a checkpoint was loaded."""
        return self._mapped is not None or self._disk is not None

    @property
    def in_any_process(self) -> bool:
        """Whether rows are read where they are mapped."""
        return self._mapped is not None

    def __repr__(self) -> str:
        return "the rows of a checkpoint"

    def thaw_parts(
        self,
        folder: Path,
        parts: Sequence[Part],
        identity: str,
        generation: int,
        ready: Callable[[], Any] = at_once,
    ) -> None:
        """As `Store.thaw_parts` says. The files have to stay; they may lose their names."""
        self._check_open()
        if all(part.facts.get("kind") != DISK_ROWS for part in parts):
            found = MappedRows(folder, parts, self.layout)
            ready()
            self._let_go()
            self._mapped = found
            self.identity, self.generation = identity, generation
            return
        beside = _folder_beside(folder.parent)
        try:
            disk = DiskStore(Path(beside.name) / "rows", self.layout, rows=self._table_rows)
            try:
                disk.thaw_parts(folder, parts, identity, generation, ready)
            except BaseException:
                disk.close()
                raise
        except BaseException:
            beside.cleanup()
            raise
        self._let_go()
        self._disk, self._folder = disk, beside
        self.identity, self.generation = identity, generation

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        if self._mapped is not None:
            self._mapped.read(kind, keys, out, found)
        elif self._disk is not None:
            found[:] = self._disk.read(keys, out)

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        raise ValueError(
            "the rows of a checkpoint are not written to: to train them, make the embeddings with store='memory' or "
            "'disk:FOLDER' and load the checkpoint into those"
        )

    def __len__(self) -> int:
        held = self._disk if self._mapped is None else self._mapped
        return 0 if held is None else len(held)

    def keys(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        held = self._disk if self._mapped is None else self._mapped
        return iter(()) if held is None else held.keys()

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        """Refused: there is nothing that the checkpoint does not have."""
        raise ValueError("these rows are a checkpoint's: to save them elsewhere, copy its folder")

    def close(self) -> None:
        """Let go of the files."""
        if not self.closed:
            super().close()
            self._let_go()

    def _let_go(self) -> None:
        self._mapped = None
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _folder_beside(folder: Path) -> "TemporaryDirectory[str]":
    """On the same file system, so that files can have second names in it, if that is possible."""
    try:
        return TemporaryDirectory(dir=folder, prefix="reading-")
    except OSError as error:
        log.warning("%s cannot be written to (%s): its rows are copied to be read", folder, error.strerror)
        return TemporaryDirectory(prefix="skirl-reading-")
