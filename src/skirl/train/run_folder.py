"""The run folder: a run's flags, progress and result, in files that outlive it. README.md here describes the format."""

import errno
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

from skirl.tools import __version__
from skirl.tools.machine import machine
from skirl.tools.os_errors import why
from skirl.tools.progress import Facts
from skirl.tools.sealed_json import COUNT, TEXT, misfit, put_whole
from skirl.tools.units import figure
from skirl.train.flags import RUNS
from skirl.train.resume import Change, changes_between

if TYPE_CHECKING:
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.metrics import Evaluation, Meter

log = logging.getLogger("skirl")

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
SWEEP, STANDING = "sweep.json", "standing.json"
WORDS = {"fetched": "refetched", "new": "new", "written": "written"}
"""How people read the counts of rows that move."""
LINE = {"kind": TEXT, "step": COUNT}  # the fields of every line


class Lines:
    """JSON lines. The file grows by whole pieces: one that fails leaves nothing behind, and does not stop the next."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
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

    def write(self, line: Mapping[str, Any]) -> None:
        self.add((json.dumps(line) + "\n").encode())

    def close(self) -> None:
        self._file.close()


class TensorBoard(Lines):
    """A TensorBoard event file. torch's writer has its own thread, whose errors appear as tracebacks, too late to retry."""

    events = "TensorBoard's events"

    def __init__(self, folder: Path, begun_at: int) -> None:
        proto = "tensorboard.compat.proto"  # created at import, so type checkers cannot see them
        event, summary = (import_module(f"{proto}.{module}_pb2") for module in ("event", "summary"))
        self._records = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        self._event, self._summary = event.Event, summary.Summary
        file = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        super().__init__(folder / file)
        self.name = self.events
        head = [self._of(file_version="brain.Event:2")]
        if begun_at:  # has TensorBoard skip what a killed run wrote after this step
            log = event.SessionLog(status=event.SessionLog.START)
            head.append(self._of(step=begun_at + 1, session_log=log))
        self.add(b"".join(head))

    def write(self, line: Mapping[str, Any]) -> None:
        numbers = {name: float(of) for name, of in line.items() if name != "step" and isinstance(of, int | float)}
        values = [self._summary.Value(tag=f"{line['kind']}/{name}", simple_value=of) for name, of in numbers.items()]
        self.add(self._of(step=line["step"], summary=self._summary(value=values)))

    def _of(self, **content: Any) -> bytes:
        out = io.BytesIO()
        self._records(out).write(self._event(wall_time=time.time(), **content).SerializeToString())
        return out.getvalue()


class RunFolder:
    """Writes a run folder. It is part of a checkpoint, so that a resumed run finds it again. A failure to write does not end
    the run: a warning says what is missing, and `missing` lists it."""

    def __init__(
        self, folder: str, *, name: str, flags: Mapping[str, Any], every: int = 50, resume: bool = False,
        trainers: int = 1,
    ) -> None:  # fmt: skip
        """Check the folder. "none" writes nothing, "auto" makes a new one named after `name` and the time."""
        self.folder = folder_of(folder, name, CONFIG, resume)
        self.every = every
        self.begun_at = 0  # the step that the run goes on from
        self.changed: list[Change] = []  # from those of the saved run
        self._changes: list[Change] = []
        self._auto, self._opened = folder == "auto", False
        self._flags = dict(flags)
        self._trainers = trainers
        self._missing = Missing()
        self._sinks: list[Lines] = []
        self._lines: Lines | None = None
        self._check: Callable[[], None] = lambda: None
        self._since: Since

    def begin(self, batches: "Lookahead", meter: "Meter", check: Callable[[], None] = lambda: None) -> "RunFolder":
        """check: raises Superseded if a newer start of the run has taken the folder."""
        self.begun_at, self._check = batches.step, check
        self._since = Since(batches, meter)
        self.changed = [change | {"step": self.begun_at} for change in self.changed]
        self._changes += self.changed
        return self

    def open(self) -> None:
        """Make the folder, after the first step: a run that is refused leaves nothing in the way of the next try."""
        if self._opened:
            return
        self._opened = True
        if (folder := self.folder) is None:
            return
        self._check()
        self.folder = None
        with self._missing.tried(f"the run's folder {folder}", None, of=OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = folder
        if self.folder is None:
            return
        with self._missing.tried(CONFIG, folder):
            packages = ("torch", "numpy", "numba")
            put_json(folder / CONFIG, {
                "command": "train", "flags": self._flags, "machine": machine(),
                "versions": {"python": python_version(), "skirl": __version__} | {name: version(name) for name in packages},
                "started": datetime.now(UTC).isoformat(timespec="seconds"), "begun_at": self.begun_at,
                "trainers": self._trainers, "changes": self._changes,
            })  # fmt: skip
        with self._missing.tried(METRICS, folder, of=OSError):
            (folder / RESULT).unlink(missing_ok=True)
            self._lines = self._cut(folder)
            self._sinks.append(self._lines)
        with self._missing.tried(TensorBoard.events, folder):
            self._sinks.append(TensorBoard(folder, self.begun_at))

    def close(self) -> None:
        for sink in self._sinks:
            with self._missing.tried(sink.name, self.folder):
                sink.close()
        self._lines = None

    @property
    def path(self) -> str | None:
        return None if self.folder is None else str(self.folder)

    def after_step(
        self, batches: "Lookahead", meter: "Meter", rates: Mapping[str, float], *, last: bool, evaluation: "Evaluation"
    ) -> None:
        if not self._sinks:
            return
        step = batches.step
        if last or step % self.every == 0:
            self.write(self._since.line(batches, meter) | {"lr": rates["rows"], "dense_lr": rates["dense"]})
        if evaluation.step == step:
            line = {"kind": "eval", "step": step, "seconds": evaluation.seconds}
            self.write(line | evaluation.result())

    def write(self, line: dict[str, Any]) -> None:
        for sink in self._sinks:
            with self._missing.tried(sink.name, self.folder, line["step"]):
                sink.write(line)

    @property
    def missing(self) -> list[str]:
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result. One that is there stays if a resume found nothing left to train."""
        if self.folder is not None and (self._opened or not (self.folder / RESULT).is_file()):
            with self._missing.tried(RESULT, self.folder):
                if not self._opened:
                    self.folder.mkdir(parents=True, exist_ok=True)
                put_json(self.folder / RESULT, result)

    def state_dict(self) -> dict[str, Any]:
        if self._lines is not None:  # lines are to be as durable as the checkpoint
            with self._missing.tried(f"the sync of {METRICS}", self.folder, of=OSError):
                self._lines.sync()
        return {"folder": self.path, "flags": self._flags, "changes": self._changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._auto and state["folder"] is not None and Path(state["folder"]).is_dir():
            self.folder = Path(state["folder"])
        self._changes = list(state["changes"])
        self.changed = changes_between(state["flags"], self._flags)

    def _cut(self, folder: Path) -> Lines:
        """Drop the lines after the step that the run goes on from, and a half line that a kill left. The rest goes to a new
        file, to which an older start that is still alive cannot write; if the disk is full, the old file is cut."""
        path, there = folder / METRICS, lines_of(folder)
        kept = sum(1 for line in there if self.begun_at and line["step"] <= self.begun_at)
        whole = b"".join(line + b"\n" for line in path.read_bytes().split(b"\n")[:kept]) if kept else b""
        try:
            put_whole(path, whole, "new", self._check)
        except OSError:
            self._check()
            with suppress(FileNotFoundError):
                os.truncate(path, len(whole))
        return Lines(path)


class Since:
    def __init__(self, batches: "Lookahead", meter: "Meter") -> None:
        self._before = _sums(batches, meter)

    def facts(self, batches: "Lookahead", meter: "Meter") -> Facts:
        line = self.line(batches, meter)
        rate = meter.speed.rate(line["samples"])
        auc, ne = ("none yet" if line[name] is None else figure(line[name]) for name in ("auc", "ne"))
        return {
            **({"samples/s": f"{rate:,.0f}"} if rate else {}), "loss": figure(line["loss"]), "AUC": auc, "NE": ne,
            **{word: f"{line[name]:,}" for name, word in WORDS.items()},
            "cache": f"{line['filled']:.0%} full",
            **({"hidden behind compute": f"{line['hidden']:.0%}"} if line["fetched"] or line["written"] else {}),
            "window": f"{line['window']} batches",
        }  # fmt: skip

    def line(self, batches: "Lookahead", meter: "Meter") -> dict[str, Any]:
        before, now, engine, times = self._before, _sums(batches, meter), batches.engines[0], batches.times
        since = {name: value - before.get(name, 0.0) for name, value in now.items()}
        busy, blame = ({s: since[f"{kind} {s}"] for s in getattr(times, kind)} for kind in ("busy", "blame"))
        total = sum(busy.values())
        self._before = now
        return {
            "kind": "train", "step": batches.step, "samples": meter.so_far["samples"], "seconds": since["seconds"],
            "samples_per_second": since["samples"] / max(since["seconds"], 1e-9),
            "loss": since["losses"] / max(1, since["steps"]),
            **{name: value for name, value in asdict(meter.metrics.scores()).items() if name != "samples"},
            **{name: getattr(engine.counters, name) for name in ("fetched", "new", "written", "forwarded")},
            "touched": len(engine.seen),
            "filled": sum(c.filled for c in engine.caches) / max(1, sum(len(c) for c in engine.caches)),
            "hidden": max(0.0, 1.0 - (since["stall"] + busy["load"]) / total) if total else 1.0,
            "stall": since["stall"], "read": since["read"], "busy": busy, "blame": blame, "window": batches.window,
        }  # fmt: skip


def _sums(batches: "Lookahead", meter: "Meter") -> dict[str, float]:
    times, so_far = batches.times, meter.so_far
    counts = {"steps": so_far["steps"], "samples": so_far["samples"], "losses": so_far["sum"]}
    stages = {f"{kind} {stage}": s for kind in ("busy", "blame") for stage, s in getattr(times, kind).items()}
    return counts | {"seconds": meter.speed.seconds, "stall": times.stall, "read": times.read} | stages


class Missing:
    """The parts that are missing from the files in a folder. Errors in its `tried` blocks do not end the run."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[list[int], str]] = {}  # steps of the lines that each part lacks; the first reason

    @contextmanager
    def tried(
        self, what: str, where: Path | None, step: int | None = None, *, of: type[Exception] = Exception
    ) -> Iterator[None]:
        """Record an error of type `of` in this block, which writes `what` or its line of a step, instead of raising it."""
        try:
            yield
        except of as error:
            text = why(error)
            if not self._parts:
                at = what if where is None else f"{what} in {where}"
                log.warning("%s could not be written, %s. Training goes on, and its end says what is missing", at, text)
            steps, _ = self._parts.setdefault(what, ([], text))
            steps += [] if step is None else [step]

    def told(self) -> list[str]:
        lines = []
        for what, (steps, text) in self._parts.items():
            lack = f"{len(steps):,} lines, of steps {steps[0]:,} to {steps[-1]:,}" if steps else ""
            lack = f"the line of step {steps[0]:,}" if len(steps) == 1 else lack
            lines.append(f"{what} lacks {lack}: {text}" if steps else f"{what} is missing: {text}")
        return lines


def lines_of(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, out of its folder, without a half line that a kill left."""
    path = Path(folder) / METRICS
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder: name that of a run")
    if not path.exists():
        return []
    data = path.read_bytes()
    lines = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            lines.append(json.loads(line))
            wrong = misfit(lines[-1], LINE)
        except (ValueError, RecursionError) as error:
            wrong = " ".join(str(error).split())
        if wrong is not None:
            raise ValueError(f"{path}, line {number} is not a line of metrics ({wrong}): fix it, or take it out")
    return lines


def folder_of(where: str, name: str, first: str, resume: bool) -> Path | None:
    """Return the folder of a run or a sweep: for "auto" one that nobody has, in the one for all runs. Raise if it holds
    the first file of another."""
    if where == "auto":
        stem = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
        return Path(os.environ.get(RUNS) or "runs") / f"{stem}-{secrets.token_hex(2)}"
    path = None if where == "none" else Path(where)
    if path is not None and path.exists() and not path.is_dir():
        raise ValueError(f"run is {path}, which is a file: set it to a folder")
    if path is not None and not resume and (path / first).exists():
        raise ValueError(
            f"run is {path}, which already holds a run: set run to another folder, or add --resume and its --save"
        )
    return path


def put_json(path: Path, value: Mapping[str, Any]) -> None:
    put_whole(path, (json.dumps(value, indent=1, default=str) + "\n").encode(), "new")
