"""Removing a store in which nothing was kept, so that a run that is refused leaves no folder behind."""

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from skirl.store.disk import lock
from skirl.store.disk.manifest import NAME, Manifest
from skirl.store.disk.segment import Unusable
from skirl.store.disk.store import DiskStore


def removed_after(store: DiskStore) -> Callable[[], object]:
    """Remove the store's folder once nobody uses it, at the latest when the process ends, unless it has got rows by then.

    Returns a function that does so now.

    **Arguments**

    - `store`: the store.
    """
    return weakref.finalize(store, _remove, store.path, os.getpid())


def _remove(folder: Path, process: int) -> None:
    with suppress(OSError, Unusable):
        if os.getpid() != process or set(os.listdir(folder)) != {NAME, lock.NAME}:
            return  # a fork of the process, or other files
        manifest = Manifest.read(folder / NAME)
        if manifest.generation == 0 and not manifest.about:
            os.unlink(folder / NAME)
            os.unlink(folder / lock.NAME)
            os.rmdir(folder)
