"""A checkpoint being saved: its rows are frozen in the training loop and written by a thread, so that training stops only
for milliseconds.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from skirl.checkpoint import dense, folder, starts
from skirl.checkpoint.own_rows import FrozenCaches
from skirl.engine.engine import Engine
from skirl.store.disk.frozen import check_files
from skirl.store.disk.manifest import check_sizes
from skirl.tools.os_errors import ROOM, NotWritten, of_system, why
from skirl.tools.sealed_json import CheckpointError, write_sealed

log = logging.getLogger("skirl")


class Saving:
    """A checkpoint that is being written. `skirl.save` makes and returns it.

    **Arguments**

    - `path`: the folder of checkpoints.
    - `number`: the number of this one, one above the last in the folder; 0 if this run has none there yet.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.folder = path
        self.number = number
        self.after: int | None = None
        """The checkpoint in this folder that the run resumed from, or saved last."""
        self.start: int | None = None
        """The start of the run that writes to this folder. None until it has resumed or saved there."""
        self.pause = 0.0
        """Seconds that training stood still."""
        self.seconds = 0.0
        """Seconds until it was on disk."""
        self.bytes = 0
        """Bytes written for this checkpoint, without those of files that it shares with the one before."""
        self.files: dict[str, Any] = {}
        """The entry of each collection's rows in the header. The next checkpoint builds on it."""
        self.failure: BaseException | None = None
        """Why it could not be written."""
        self._thread: threading.Thread | None = None
        self._told = False

    @property
    def path(self) -> Path:
        """Path of its header, which is written last."""
        return folder.header(self.folder, self.number)

    @property
    def done(self) -> bool:
        """True once it is on disk or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def given_up(self) -> "Saving":
        """Return what the next checkpoint follows if this one failed: the one before, without files, to write all rows."""
        return self._other(self.after or 0)

    def bare(self) -> "Saving":
        """Return this checkpoint without its files, so that the next one writes all rows."""
        return self._other(self.number)

    def _other(self, number: int) -> "Saving":
        other = Saving(self.folder, number)
        other.start = self.start
        return other

    def begin(self, before: "Saving | None") -> None:
        """Set the start of the run and what this follows, from the checkpoint before if that is in the same folder.

        **Arguments**

        - `before`: the last checkpoint of these rows.
        """
        if before is not None and before.folder == self.folder:
            self.start, self.after = before.start, before.number or None
        if self.start is None:
            self.start = starts.claim(self.folder)
        starts.check(self.folder, self.start)

    def run(self, write: Callable[[], None]) -> None:
        """Write in the background.

        **Arguments**

        - `write`: writes the whole checkpoint, and cleans up if that fails.
        """

        def guarded() -> None:
            try:
                write()
            except BaseException as error:
                self.failure = refused(self.folder, error)

        self._thread = threading.Thread(target=guarded, name="skirl checkpoint")
        self._thread.start()

    def wait(self) -> "Saving":
        """Wait until the checkpoint is on disk. If it could not be written, the first call raises the error."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(0.1)  # in short waits, so that Ctrl-C gets through
        if self.failure is not None and not self._told:
            self._told = True
            raise self.failure
        return self

    def files_are_there(self) -> bool:
        """Return whether the files on which the next checkpoint would build are still there."""
        rows = self.folder / folder.ROWS
        try:
            for part in self.files.values():
                check_files(rows, part["store"])
                check_sizes(rows, {entry["file"]: entry["bytes"] for entry in part["cache"]["files"]})
        except CheckpointError:
            return False
        return True


class FrozenCollection:
    """The rows of one collection at the moment this is made. `before` is what the last checkpoint wrote of them."""

    def __init__(self, engine: Engine, path: Path, before: dict[str, Any]) -> None:
        rows = path / folder.ROWS
        self._changes = [cache.changes for cache in engine.caches]
        same = before.get("changes") == self._changes
        self._caches = FrozenCaches(engine.caches, rows, before["cache"] if same else None)
        try:
            self._store = engine.store.freeze(rows, before.get("store"))
        except BaseException:
            self._caches.release()
            raise

    def write(self) -> dict[str, Any]:
        """Write all rows to disk. Those in the cache come first: they change most often, and are set aside when they do."""
        cache = self._caches.write()
        return {"store": self._store.write(), "cache": cache, "changes": self._changes}

    def release(self) -> None:
        """Release the rows, once they are written or given up."""
        self._caches.release()
        self._store.release()


class AllFrozen:
    """The frozen rows of all collections of a model, by their names in it."""

    def __init__(self, engines: Mapping[str, Engine], path: Path, since: Saving | None) -> None:
        before = since.files if since is not None and since.folder == path else {}
        if before and since is not None and not since.files_are_there():
            log.warning("%s has lost files that its last checkpoint wrote: all rows are written again", path)
            before = {}
        self._parts: dict[str, FrozenCollection] = {}
        try:
            for name, engine in engines.items():
                self._parts[name] = FrozenCollection(engine, path, before.get(name, {}))
        except BaseException:
            self.release()
            raise

    def write(self) -> dict[str, Any]:
        """Write all rows. Return what the header says about them, by collection."""
        return {name: part.write() for name, part in self._parts.items()}

    def release(self) -> None:
        """Release the rows, once they are written or given up."""
        for part in self._parts.values():
            part.release()


def write(
    saving: Saving, path: Path, frozen: AllFrozen, tensors: dict[str, Any], body: dict[str, Any], keep: int
) -> None:
    """Write all files, then the header, then remove what is no longer needed. Runs in the thread."""
    began = time.perf_counter()
    mark = secrets.token_hex(8)
    before = _sizes(path)
    try:
        try:
            rows = frozen.write()
        finally:
            frozen.release()
        entry = dense.write(path, mark, tensors)
        named = {name: {"store": part["store"], "cache": part["cache"]} for name, part in rows.items()}
        head = body | {"number": saving.number, "start": saving.start, "dense": entry, "rows": named}
        write_sealed(saving.path, head, mark, partial(starts.check, path, saving.start))
    except BaseException:
        with suppress(OSError):  # the next save sweeps again
            if not saving.path.exists():  # it does if an interrupt came after the rename
                folder.sweep(path, saving.start)
        raise
    saving.bytes = sum(size for name, size in _sizes(path).items() if name not in before)
    saving.files = rows
    try:
        folder.retain(path, saving.number, keep, saving.after, saving.start)
    except OSError as error:  # the checkpoint is complete without this
        log.warning("could not look for what is not needed any more in %s: %s", path, why(error))
    saving.seconds = time.perf_counter() - began


def _sizes(path: Path) -> dict[str, int]:
    """Return the bytes that each file takes. A hard link to a store's file counts as none."""
    found = {}
    with suppress(OSError):  # files may be removed meanwhile
        for file in path.rglob("*"):
            if file.is_file():
                stat = file.stat()
                found[str(file)] = stat.st_size if stat.st_nlink == 1 else 0
    return found


def refused(path: Path, error: BaseException) -> BaseException:
    """Return what to raise if a checkpoint could not be saved: a NotWritten if the system refused, else the error itself."""
    found = of_system(error)
    if found is None or isinstance(error, NotWritten):
        return error
    told = not_written(path, why(error, path), found.errno)
    told.__cause__ = error
    return told


def not_written(path: Path, reason: str, number: int | None) -> NotWritten:
    """Return the error that says that a folder got no new checkpoint, why, and what stays. `number` is the errno."""
    there: list[int] = []
    with suppress(OSError):
        there = folder.numbers(path)
    stays = f"checkpoint {there[-1]} in it stays whole" if there else "there is none in it"
    then = "free some room" if number in ROOM else "make it a folder that can be written to"
    return NotWritten(f"{path} got no new checkpoint, {reason}; {stays}: {then}, and save again", number)


def settled(engines: Mapping[str, Engine]) -> Saving | None:
    """Return the last checkpoint of these rows, once it is on disk. If it could not be written, raise its error once."""
    for saving in [engine.saving for engine in engines.values()]:
        if saving is None:
            continue
        try:
            saving.wait()
        finally:
            if saving.done and saving.failure is not None:
                remember(engines, saving.given_up())
    last = [engine.saving for engine in engines.values()]
    # If only some collections were part of it, the next checkpoint writes all rows.
    return last[0] if all(saving is last[0] for saving in last) else None


def claimed(engines: Mapping[str, Engine], path: Path, start: int | None) -> int:
    """Assign the next checkpoints in this folder to a start. Return the number of the one that was loaded there, or 0."""
    loaded = settled(engines)
    last = loaded if loaded is not None and loaded.folder == path else Saving(path, 0)
    last.start = start
    remember(engines, last)
    return last.number


def remember(engines: Mapping[str, Engine], saving: Saving | None) -> None:
    for engine in engines.values():
        engine.saving = saving
