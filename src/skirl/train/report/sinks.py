"""Destinations for the numbers of a run while it runs: a file of lines, a TensorBoard event file, Weights & Biases."""

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
SCORES = ("train/loss", "train/auc", "train/logloss", "test/auc", "test/logloss")
"""Tags of the scores that TensorBoard's table of hyperparameters has columns for."""

Table = Mapping[str, Mapping[str, Any]]
"""The values that differ between runs, by name of the run."""


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

    def __init__(self, folder: Path, begun_at: int, table: Table | None = None, name: str = "") -> None:
        proto = "tensorboard.compat.proto"  # created at import, so type checkers cannot see them
        event, summary = (import_module(f"{proto}.{module}_pb2") for module in ("event", "summary"))
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event, self._summary = event.Event, summary.Summary
        begun, ended = ([], []) if table is None else _hyperparameters(table, name)
        file = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = folder / file
        self._file = Appended(self.path)
        head = [self._of(file_version="brain.Event:2")]
        if begun_at:  # has TensorBoard skip what a killed run wrote after this step
            log = event.SessionLog(status=event.SessionLog.START)
            head.append(self._of(step=begun_at + 1, session_log=log))
        self._due = b"".join([*head, *(self._of(summary=each) for each in begun)])
        """What has to be written before anything else."""
        self._end = b"".join(self._of(summary=each) for each in ended)
        self._add(b"")

    def write(self, line: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in tagged(line)]
        self._add(self._of(step=line["step"], summary=self._summary(value=values)))

    def close(self) -> None:
        try:
            self._file.add(self._end)
        finally:
            self._file.close()

    def _add(self, piece: bytes) -> None:
        self._file.add(self._due)
        self._due = b""
        self._file.add(piece)

    def _of(self, **content: Any) -> bytes:
        out = io.BytesIO()
        self._records(out).write(self._event(wall_time=time.time(), **content).SerializeToString())
        return out.getvalue()


def _hyperparameters(table: Table, name: str) -> tuple[list[Any], list[Any]]:
    """Return summaries for the start and the end of a run among several, for TensorBoard's table of their values."""
    hparams = import_module("torch.utils.tensorboard.summary").hparams
    values, known = dict(table[name]), dict[str, list[Any]]()
    for column in sorted({column for of in table.values() for column in of}):
        all_values = [of[column] for of in table.values() if column in of]
        number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in all_values)
        as_shown = float if number else str
        known[column] = list(dict.fromkeys(map(as_shown, all_values)))
        if column in values:
            values[column] = as_shown(values[column])
    experiment, start, end = hparams(values, dict.fromkeys(SCORES, 0.0), known)
    about = start.value[0].metadata.plugin_data
    data = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData.FromString(about.content)
    data.session_start_info.group_name = name
    about.content = data.SerializeToString()
    return [experiment, start], [end]


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
        self._run.log(dict(tagged(line)), step=line["step"])

    def close(self) -> None:
        self._run.finish()


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
