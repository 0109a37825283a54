"""Destinations for the numbers of a run while it runs: a file of lines, a TensorBoard event file."""

import errno
import io
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

GROUPS = {
    "rows": ("fetched", "new", "written", "forwarded", "touched", "filled", "window"),
    "time": ("samples_per_second", "seconds", "hidden", "stall", "read"),
    "rate": ("lr", "dense_lr"),
}


class Appended:
    """A file that grows by whole pieces: one that fails leaves nothing behind, and does not stop the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def sync(self) -> None:
        """Return once all pieces would survive a crash of the machine."""
        os.fsync(self._file.fileno())

    def add(self, piece: bytes) -> None:
        """Append a piece. Raise OSError if it could not be written, or if the file was removed or replaced."""
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
        self._file.close()


class Lines(Appended):
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name = path.name

    def write(self, line: Mapping[str, Any]) -> None:
        self.add((json.dumps(line) + "\n").encode())


class TensorBoard:
    """A TensorBoard event file. torch's writer has its own thread, whose errors appear as tracebacks, too late to retry."""

    name = "TensorBoard's events"

    def __init__(self, folder: Path, begun_at: int) -> None:
        proto = "tensorboard.compat.proto"  # created at import, so type checkers cannot see them
        event, summary = (import_module(f"{proto}.{module}_pb2") for module in ("event", "summary"))
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event, self._summary = event.Event, summary.Summary
        file = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / file
        self._file = Appended(self.path)
        head = [self._of(file_version="brain.Event:2")]
        if begun_at:  # has TensorBoard skip what a killed run wrote after this step
            log = event.SessionLog(status=event.SessionLog.START)
            head.append(self._of(step=begun_at + 1, session_log=log))
        self._due = b"".join(head)
        """What has to be written before anything else."""
        self._add(b"")

    def write(self, line: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in tagged(line)]
        self._add(self._of(step=line["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _add(self, piece: bytes) -> None:
        self._file.add(self._due)
        self._due = b""
        self._file.add(piece)

    def _of(self, **content: Any) -> bytes:
        out = io.BytesIO()
        self._records(out).write(self._event(wall_time=time.time(), **content).SerializeToString())
        return out.getvalue()


def tagged(line: Mapping[str, Any]) -> list[tuple[str, int | float]]:
    """Return the numbers of a line under tags that TensorBoard groups by.

    >>> tagged({"kind": "train", "step": 3, "loss": 0.5, "lr": 0.1, "busy": {"plan": 2.0}})
    [('train/loss', 0.5), ('rate/lr', 0.1)]
    """
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    found = []
    for name, value in line.items():
        if name != "step" and isinstance(value, int | float):
            test = line["kind"] == "eval"
            group = "test" if test else group_of.get(name, "train")
            found.append((f"{group}/{name.removeprefix('test_')}" if test else f"{group}/{name}", value))
    return found
