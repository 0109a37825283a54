"""A checkpoint being saved: its rows are frozen in the training loop, for milliseconds, and written by a thread."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from skirl.checkpoint import codec, folder
from skirl.checkpoint.votes import agreed, told
from skirl.engine.engine import Engine
from skirl.peers.base import PeerError, Peers
from skirl.store.base import Frozen
from skirl.tools.os_errors import ROOM, NotWritten, of_system, why
from skirl.tools.sealed_json import write_sealed

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
        """Rows as the header names them, by collection. The next checkpoint builds on them."""
        self.failure: BaseException | None = None
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
        before = Saving(self.folder, self.after or 0)
        before.start = self.start
        return before

    def claim(self) -> None:
        """Begin a start of the run, if it has none in this folder. Raise a Superseded if there is a newer one."""
        if self.start is None:
            self.start = folder.claim(self.folder)
        folder.check_start(self.folder, self.start)

    def run(self, write: Callable[[], None]) -> None:
        """Write in the background. `write` cleans up if it fails."""

        def guarded() -> None:
            try:
                with told_of(self.folder):
                    write()
            except BaseException as error:
                self.failure = error

        self._thread = threading.Thread(target=guarded, name="skirl checkpoint")
        self._thread.start()

    def wait(self) -> Self:
        """Wait until the checkpoint is on disk. If it could not be written, the first call raises the error."""
        if self._thread is not None:
            while self._thread.is_alive():
                self._thread.join(0.1)  # in short waits, so that Ctrl-C gets through
        if self.failure is not None and not self._told:
            self._told = True
            raise self.failure
        return self


def write(
    saving: Saving,
    peers: Peers,
    keep: int,
    part: Mapping[str, Any],
    frozen: Frozen | Exception,
    body: Mapping[str, Any],
    tensors: dict[str, Any],
) -> None:
    """Write this trainer's rows, vote, and have the first trainer commit. After an error, the checkpoint before stays.
    `part` has this trainer's counters and splits of caches; `frozen` its rows, or the error that kept it from freezing
    them; `body` and `tensors`, which only the first trainer has, what else the header says, and the dense part."""
    began, since = time.perf_counter(), folder.files_of_rows(saving.files)
    steps = {name: counters["steps"] for name, counters in part["counters"].items()}
    step = max(steps.values(), default=None)

    def rows_written() -> dict[str, Any]:
        with told_of(saving.folder):
            if isinstance(frozen, Exception):
                raise frozen
            return frozen.write()

    def committed() -> int:
        with told_of(saving.folder):
            return 0 if peers.rank else _commit(saving, {**body, "parts": parts}, tensors, keep)

    try:
        begun = told(peers, {"number": saving.number, "steps": steps}, "a checkpoint begins", step)
        saving.number = begun[0]["number"]
        if rank := next((rank for rank, of in enumerate(begun) if of["steps"] != begun[0]["steps"]), None):
            raise ValueError(
                f"rank 0 saves after {begun[0]['steps']} steps and rank {rank} after {begun[rank]['steps']}: call "
                "skirl.save on all trainers after the same step"
            )
        try:
            rows = agreed(peers, rows_written, "rows of a checkpoint are written", step)
            named = {name: {"store": of["store"], "cache": of["cache"]} for name, of in rows.items()}
            parts = told(peers, {**part, "rows": named}, "parts of a checkpoint", step)
            dense_bytes = agreed(peers, committed, "a checkpoint is committed", step)
        except Exception:
            # No rank writes here, and none begins the next checkpoint before the call below, so rank 0 may sweep.
            with suppress(OSError):  # the next save sweeps again
                if peers.rank == 0:
                    folder.sweep(saving.folder, saving.start)
            with suppress(PeerError):
                told(peers, None, "what a failed checkpoint wrote is removed", step)
            raise
    finally:
        if isinstance(frozen, Frozen):
            frozen.release()
    saving.bytes, saving.files = dense_bytes, rows
    with suppress(OSError):  # a hard link to a store's file counts as none
        stats = [(saving.folder / name).stat() for name in folder.files_of_rows(rows) - since]
        saving.bytes += sum(stat.st_size for stat in stats if stat.st_nlink == 1)
        saving.bytes += saving.path.stat().st_size if peers.rank == 0 else 0
    saving.seconds = time.perf_counter() - began


def _commit(saving: Saving, body: dict[str, Any], tensors: dict[str, Any], keep: int) -> int:
    """Write the dense part and the header, whose rename makes the checkpoint. Return the bytes of the dense part."""
    mark, path = secrets.token_hex(8), saving.folder
    entry = codec.write_dense(path, mark, tensors)
    body |= {"number": saving.number, "start": saving.start, "dense": entry}
    write_sealed(saving.path, body, mark, partial(folder.check_start, path, saving.start))
    try:
        folder.retain(path, saving.number, keep, saving.after, saving.start)
    except OSError as error:  # the checkpoint is complete without this
        log.warning("could not look for what is not needed any more in %s: %s", path, why(error))
    return entry["bytes"]


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """If the system refuses something in this block, say that a folder got no new checkpoint, why, and what stays."""
    try:
        yield
    except Exception as error:
        found = of_system(error)
        if found is None or isinstance(error, NotWritten):
            raise
        there: list[int] = []
        with suppress(OSError):
            there = folder.numbers(path)
        stays = f"checkpoint {there[-1]} in it stays whole" if there else "there is none in it"
        then = "free some room" if found.errno in ROOM else "make it a folder that can be written to"
        text = f"{path} got no new checkpoint, {why(error)}; {stays}: {then}, and save again"
        raise NotWritten(text, found.errno) from error


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
