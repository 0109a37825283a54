"""A read-only store of a checkpoint's rows."""

import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skirl.store.base import Facts, Frozen, Layout, Record, Rows, SavedRows, Store
from skirl.store.disk.store import DiskStore

log = logging.getLogger("skirl")


class CheckpointRows(Store):
    """The store behind `store="checkpoint"`: empty until `skirl.load` gives it a checkpoint's rows; it refuses writes.

    Files are hard-linked into a temporary folder next to the checkpoint; if none can be made there, they are copied to the
    system's folder for temporary files. Closing the store removes that folder.

    **Arguments**

    - `layout`: the records of each table; a mapping will do.
    - `rows`: number of rows of each table, as for a disk store.
    """

    read_only = True

    def __init__(self, layout: Layout | Mapping[int, Record], *, rows: Mapping[int, int] | None = None) -> None:
        super().__init__(layout)
        self._table_rows = rows
        self._disk: DiskStore | None = None
        self._remove: Callable[[], Any] = lambda: None

    @property
    def ready(self) -> bool:
        return self._disk is not None

    def thaw(self, saved: SavedRows) -> None:
        """The files must not change while the store is open, but may be unlinked."""
        self._check_open()
        beside = folder_beside(saved.folder.parent)
        with ExitStack() as given_up:
            given_up.callback(shutil.rmtree, beside, ignore_errors=True)
            disk = given_up.enter_context(DiskStore(beside / "rows", self.layout, rows=self._table_rows))
            disk.thaw(saved)
            given_up.pop_all()
        self._let_go()
        self._disk, self._remove = disk, weakref.finalize(self, _remove, beside, os.getpid())
        self.identity, self.generation = saved.identity, saved.generation

    def _read(self, kind: int, keys: NDArray[np.int64], out: Rows, found: NDArray[np.bool_]) -> None:
        if self._disk is not None:
            self._disk._read(kind, keys, out, found)

    def _write(self, kind: int, keys: NDArray[np.int64], rows: Rows) -> None:
        raise ValueError(
            "the rows of a checkpoint are not written to: to train them, make the embeddings with store='memory' or "
            "'disk:FOLDER' and load the checkpoint into those"
        )

    def describe(self, about: Mapping[str, Any] | None = None) -> int:
        self.about = self.about if about is None else dict(about)
        return 0 if self._disk is None else len(self._disk)

    def held(self) -> Iterator[NDArray[np.int64]]:
        self._check_open()
        return iter(()) if self._disk is None else self._disk.held()

    def freeze(self, folder: Path, since: Facts | None) -> Frozen:
        raise ValueError("these rows are a checkpoint's: to save them elsewhere, copy its folder")

    def close(self, *, flush: bool = True) -> None:
        if not self.closed:
            super().close()
            self._let_go()

    def _let_go(self) -> None:
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        self._remove()


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def folder_beside(folder: Path) -> Path:
    """Make a temporary folder in `folder`, so that files can be hard-linked into it; elsewhere if that fails."""
    try:
        return Path(mkdtemp(dir=folder, prefix="reading-"))
    except OSError as error:
        log.warning("%s cannot be written to (%s): its rows are copied to be read", folder, error.strerror)
        return Path(mkdtemp(prefix="skirl-reading-"))
