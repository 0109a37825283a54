"""Destinations for the numbers of a run while it runs: a file of lines, a TensorBoard event file, Weights & Biases."""

import errno
import io
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from skirl.train.report.hyperparameters import Hyperparameters, Table

GROUPS = {
    "rows": ("fetched", "new", "written", "forwarded", "touched", "filled", "window"),
    "time": ("samples_per_second", "seconds", "hidden", "stall", "read"),
    "rate": ("lr", "dense_lr"),
}


class Appended:
    """A file that grows by whole pieces: one that fails leaves nothing behind, and does not stop the next."""

    def __init__(self, path: Path, whole: bytes | None = None) -> None:
        self.path = path
        self._file: io.FileIO = path.open("a+b", buffering=0) if whole is None else _begun(path, whole)

    @property
    def gone(self) -> bool:
        """True if the file was removed or replaced, so that nobody could read what is written to it."""
        try:
            return not os.fstat(self._file.fileno()).st_nlink
        except OSError as error:  # another machine removed it
            return error.errno == errno.ESTALE

    def again(self) -> bool:
        """Put the file back in its place and return whether with all that it held. Raise OSError if that fails.

        A file that another machine has removed cannot be read any more; pieces are then appended to what is there.
        """
        held: bytes | None = None
        with suppress(OSError):
            self._file.seek(0)
            held = self._file.readall()
        new = self.path.open("a+b", buffering=0) if held is None else _begun(self.path, held)
        with suppress(OSError):
            self._file.close()
        self._file = new
        return held is not None

    def sync(self) -> None:
        """Return once all pieces would survive a crash of the machine."""
        os.fsync(self._file.fileno())

    def write(self, piece: bytes) -> None:
        """Append a piece. Raise OSError if it could not be written, or if the file was removed."""
        before = os.fstat(self._file.fileno())
        if not before.st_nlink:  # nobody could read the piece
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), before.st_size)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _begun(path: Path, whole: bytes) -> io.FileIO:
    """Put a new file in place of a path and return it, open. A kill leaves the path either unchanged or with all of it."""
    draft = path.with_name(f"{path.name}-{secrets.token_hex(8)}.new")
    file = draft.open("a+b", buffering=0)
    try:
        rest = memoryview(whole)
        while rest:
            rest = rest[file.write(rest) :]
        draft.replace(path)
    except BaseException:
        file.close()
        with suppress(OSError):
            draft.unlink()
        raise
    return file


class Lines:
    """A file of JSON lines. Its arguments and methods are those of `Appended`."""

    def __init__(self, path: Path, whole: bytes | None = None) -> None:
        self.name = path.name
        self._file = Appended(path, whole)
        self.again, self.sync = self._file.again, self._file.sync

    @property
    def gone(self) -> bool:
        """True if the file was removed or replaced."""
        return self._file.gone

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self._file.write((json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """A TensorBoard event file. torch's writer has its own thread, whose errors appear as tracebacks, too late to retry."""

    name = "TensorBoard's events"

    def __init__(self, folder: Path, begun_at: int, table: Table | None = None, name: str = "") -> None:
        proto = "tensorboard.compat.proto"  # created at import, so type checkers cannot see them
        event, summary = (import_module(f"{proto}.{name}_pb2") for name in ("event", "summary"))
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event, self._summary = event.Event, summary.Summary
        self._of_several = None if table is None else Hyperparameters(table, name)
        file = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / file
        self._file = Appended(self.path)
        head = [event.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if begun_at:  # has TensorBoard skip what a killed run wrote after this step
            log = event.SessionLog(status=event.SessionLog.START)
            head.append(event.Event(wall_time=time.time(), step=begun_at + 1, session_log=log))
        if self._of_several is not None:
            head += [event.Event(wall_time=time.time(), summary=summary) for summary in self._of_several.begun()]
        self._head: bytes | None = b"".join(map(self._record, head))
        self._begin()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the numbers of a line."""
        self._begin()
        numbers = [(tag, value) for tag, value in tagged(line) if isinstance(value, int | float)]
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in numbers]
        event = self._event(wall_time=time.time(), step=line["step"], summary=self._summary(value=values))
        self._file.write(self._record(event))

    def close(self) -> None:
        """Write the end of the run and close the file."""
        of_several, self._of_several = self._of_several, None
        try:
            if of_several is not None:
                self._file.write(self._record(self._event(wall_time=time.time(), summary=of_several.ended())))
        finally:
            self._file.close()

    def _begin(self) -> None:
        """Write the file's header unless it is there already."""
        if self._head is not None:
            self._file.write(self._head)
            self._head = None

    def _record(self, event: Any) -> bytes:
        out = io.BytesIO()
        self._records(out).write(event.SerializeToString())
        return out.getvalue()


class WandB:
    """A Weights & Biases run."""

    name = "Weights & Biases"

    def __init__(self, project: str, name: str, flags: Mapping[str, Any]) -> None:
        try:
            module = import_module("wandb")
        except ImportError:
            raise ValueError(
                "wandb is set, but its package is not installed: pip install wandb, or leave wandb out"
            ) from None
        self._run = module.init(project=project, name=name, config=dict(flags))

    def write(self, line: Mapping[str, Any]) -> None:
        """Log the numbers of a line."""
        numbers = {tag: value for tag, value in tagged(line) if isinstance(value, int | float)}
        self._run.log(numbers, step=line["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def tagged(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the numbers of a line under tags that TensorBoard groups by.

    >>> tagged({"kind": "train", "step": 3, "loss": 0.5, "lr": 0.1, "busy": {"plan": 2.0}})
    [('train/loss', 0.5), ('rate/lr', 0.1), ('busy/plan', 2.0)]
    """
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    found: list[tuple[str, Any]] = []
    for name, value in line.items():
        if name in ("kind", "step"):
            continue
        if isinstance(value, Mapping):
            found += [(f"{name}/{inner}", number) for inner, number in value.items()]
        elif line["kind"] == "eval":
            found.append((f"test/{name.removeprefix('test_')}", value))
        else:
            found.append((f"{group_of.get(name, 'train')}/{name}", value))
    return found
