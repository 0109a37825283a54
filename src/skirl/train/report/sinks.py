"""Where the numbers of a run go while it runs: a file of lines, an event file of TensorBoard, Weights & Biases."""

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
    """A file that grows by whole pieces: one that fails leaves nothing behind, and the next can be tried all the same.

    **Arguments**

    - `path`: of the file, which may be there.
    - `whole`: what it begins with: it is another file then, and takes the place of that which is there, whoever writes to
      that. None: pieces go behind what is there.
    """

    def __init__(self, path: Path, whole: bytes | None = None) -> None:
        self.path = path
        self._file: io.FileIO = path.open("a+b", buffering=0) if whole is None else _begun(path, whole)

    @property
    def gone(self) -> bool:
        """Whether the file was removed, or another one took its place: what is written goes where nobody can read it."""
        try:
            return not os.fstat(self._file.fileno()).st_nlink
        except OSError as error:  # another machine did it
            return error.errno == errno.ESTALE

    def again(self) -> bool:
        """Put the file back in its place; whether with all that it held. An OSError if that cannot be done.

        What another machine has removed cannot be read any more: pieces then go behind what is there.
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
        """Append a piece; an OSError if it could not be written, or if the file was removed."""
        before = os.fstat(self._file.fileno())
        if not before.st_nlink:  # it would go where nobody can read it
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
        """Let the file go."""
        self._file.close()


def _begun(path: Path, whole: bytes) -> io.FileIO:
    """A new file in the place of a path, open; all of it or nothing, whenever the run is killed."""
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
    """A file with a line of JSON for each: arguments and calls are those of `Appended`."""

    def __init__(self, path: Path, whole: bytes | None = None) -> None:
        self.name = path.name
        self._file = Appended(path, whole)
        self.again, self.sync = self._file.again, self._file.sync

    @property
    def gone(self) -> bool:
        """Whether lines go where nobody can read them."""
        return self._file.gone

    def write(self, line: Mapping[str, Any]) -> None:
        """One more line."""
        self._file.write((json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """The run is over."""
        self._file.close()


class TensorBoard:
    """An event file. torch's writer has a thread of its own, whose errors come as tracebacks and too late to try again.

    **Arguments**

    - `folder`: that it is in.
    - `begun_at`: the step that the run goes on from.
    - `table`, `name`: what differs between several runs, of each by its name, and that of this one; None: it is alone.
    """

    name = "TensorBoard's events"

    def __init__(self, folder: Path, begun_at: int, table: Table | None = None, name: str = "") -> None:
        proto = "tensorboard.compat.proto"  # modules made at import, which no type checker sees through
        event, summary = (import_module(f"{proto}.{name}_pb2") for name in ("event", "summary"))
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event, self._summary = event.Event, summary.Summary
        self._of_several = None if table is None else Hyperparameters(table, name)
        file = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = Appended(folder / file)
        head = [event.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if begun_at:  # what a run that was killed wrote after this step is passed over
            log = event.SessionLog(status=event.SessionLog.START)
            head.append(event.Event(wall_time=time.time(), step=begun_at + 1, session_log=log))
        if self._of_several is not None:
            head += [event.Event(wall_time=time.time(), summary=summary) for summary in self._of_several.begun()]
        self._head: bytes | None = b"".join(map(self._record, head))
        self._begin()

    def write(self, line: Mapping[str, Any]) -> None:
        """The numbers of one more line."""
        self._begin()
        numbers = [(tag, value) for tag, value in tagged(line) if isinstance(value, int | float)]
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in numbers]
        event = self._event(wall_time=time.time(), step=line["step"], summary=self._summary(value=values))
        self._file.write(self._record(event))

    def close(self) -> None:
        """The run is over."""
        of_several, self._of_several = self._of_several, None
        try:
            if of_several is not None:
                self._file.write(self._record(self._event(wall_time=time.time(), summary=of_several.ended())))
        finally:
            self._file.close()

    def _begin(self) -> None:
        """What stands at the beginning of the file, if it is not there yet."""
        if self._head is not None:
            self._file.write(self._head)
            self._head = None

    def _record(self, event: Any) -> bytes:
        out = io.BytesIO()
        self._records(out).write(event.SerializeToString())
        return out.getvalue()


class WandB:
    """Weights & Biases, where it is asked for."""

    name = "Weights & Biases"

    def __init__(self, project: str, name: str, flags: Mapping[str, Any]) -> None:
        try:
            module = import_module("wandb")
        except ImportError:
            raise ValueError("wandb is set, and the package is not there: pip install wandb, or leave it out") from None
        self._run = module.init(project=project, name=name, config=dict(flags))

    def write(self, line: Mapping[str, Any]) -> None:
        """The numbers of one more line."""
        numbers = {tag: value for tag, value in tagged(line) if isinstance(value, int | float)}
        self._run.log(numbers, step=line["step"])

    def close(self) -> None:
        """The run is over."""
        self._run.finish()


def tagged(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The numbers of a line under the names that TensorBoard groups by.

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
