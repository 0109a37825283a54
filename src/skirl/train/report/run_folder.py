"""The run folder: a run's flags, progress and result, in files that outlive it. README.md here describes the format."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import TracebackType
from typing import TYPE_CHECKING, Any

from skirl.checkpoint.starts import Superseded
from skirl.tools.machine import machine
from skirl.tools.sealed_json import COUNT, TEXT, misfit, put_whole
from skirl.train.flags import RUNS
from skirl.train.report.hyperparameters import Table
from skirl.train.report.missing import Missing
from skirl.train.report.sinks import Lines, TensorBoard, WandB
from skirl.train.resumed import Change, changes_between

if TYPE_CHECKING:
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.evaluation import Evaluation
    from skirl.train.meter import Meter

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"


class RunFolder:
    """Writes a run folder. It is part of a checkpoint, so that a resumed run finds it again.

    A failure to write does not end the run: a warning says what is missing, and `missing` lists it.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with RunFolder(folder, name="test", flags={"dim": 4}) as run:
    ...     run.write({"kind": "train", "step": 1, "loss": 0.7})
    >>> lines_of(folder)
    [{'kind': 'train', 'step': 1, 'loss': 0.7}]
    """

    def __init__(
        self,
        folder: str,
        *,
        name: str,
        flags: Mapping[str, Any],
        every: int = 50,
        wandb: str | None = None,
        resume: bool = False,
        trainers: int = 1,
        table: Table | None = None,
    ) -> None:
        """Check the folder. "none" writes nothing, "auto" makes a new one named after `name` and the time.

        trainers: the number of trainers. table: the values that differ between this run and others, by name of the run.
        """
        from skirl.train.report.since import Since

        self.folder: Path | None = None if folder in ("none", "auto") else Path(folder)
        self.every = every
        self.begun_at = 0
        """The step that the run goes on from."""
        self.changed: list[Change] = []
        """The flags that differ from those of the saved run, from this step on."""
        self._changes: list[Change] = []
        self._auto = folder == "auto"
        self._new = False
        """Whether the folder was made here."""
        self._name, self._flags = name, dict(flags)
        self._wandb, self._trainers, self._table = wandb, trainers, table
        self._missing = Missing()
        self._sinks: list[Any] = []
        self._lines: Lines | None = None
        self._check: Callable[[], None] = lambda: None
        self._since = Since()
        self._saved_in: str | None = None
        """The folder of the saved run."""
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"run is {self.folder}, which is a file: set it to a folder")
        if not resume and (self.folder / CONFIG).exists():
            raise ValueError(
                f"run is {self.folder}, which already holds a run: set run to another folder, or go on with "
                "that one: add --resume and its --save"
            )

    def begin(self, batches: "Lookahead", meter: "Meter", check: Callable[[], None] = lambda: None) -> "RunFolder":
        """Note the step that the run starts at. To be called before entering.

        check: raises Superseded if a newer start of the run has taken its place, which the folder then belongs to.
        """
        self.begun_at, self._check = batches.step, check
        self._since.begin(batches, meter)
        self.changed = [change | {"step": self.begun_at} for change in self.changed]
        self._changes += self.changed
        return self

    def __enter__(self) -> "RunFolder":
        if self._wandb is not None:
            self._sinks.append(WandB(self._wandb, self._name, self._flags))
        if self._auto and self.folder is None:
            runs = Path(os.environ.get(RUNS) or "runs")
            with self._missing.tried("the run's folder", runs):
                self.folder, self._new = new_folder(runs, self._name), True
        if self.folder is None:
            return self
        folder = self.folder
        self._check()
        try:
            self._new = self._new or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            with self._missing.tried(f"the run's folder {folder}", None):
                raise
            self.folder = None
            return self
        with self._missing.tried(CONFIG, folder):
            put_json(folder / CONFIG, self._config())
        with self._missing.tried(METRICS, folder, of=OSError):
            (folder / RESULT).unlink(missing_ok=True)
            self._lines = self._cut(folder)
            self._sinks.append(self._lines)
        with self._missing.tried(TensorBoard.name, folder):
            self._sinks.append(TensorBoard(folder, self.begun_at, self._table, self._name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        overtaken = kind is not None and issubclass(kind, Superseded)
        try:
            if not overtaken:
                self._hold()
        except Superseded:
            overtaken = True
        for sink in self._sinks:
            with self._missing.tried(sink.name, self.folder):
                sink.close()
        self._lines = None
        if kind is None or not issubclass(kind, Exception) or self.folder is None or overtaken:
            return
        metrics = self.folder / METRICS
        if metrics.is_file() and not metrics.stat().st_size:  # no line was written: free the folder for another try
            with suppress(OSError):
                (self.folder / CONFIG).unlink(missing_ok=True)
                if self._new:
                    metrics.unlink()
                    for sink in self._sinks:
                        if isinstance(sink, TensorBoard):
                            sink.path.unlink()
                    self.folder.rmdir()

    @property
    def on(self) -> bool:
        """True if anything is written anywhere."""
        return bool(self._sinks)

    @property
    def path(self) -> str | None:
        """The folder; None if there is none."""
        return None if self.folder is None else str(self.folder)

    def after_step(
        self, batches: "Lookahead", meter: "Meter", rates: Mapping[str, float], *, last: bool, evaluation: "Evaluation"
    ) -> None:
        """Write what is due after a step. last: whether it is the last step of the run."""
        if not self.on:
            return
        step = batches.step
        if last or step % self.every == 0:
            self.write(self._since.line(batches, meter) | {"lr": rates["rows"], "dense_lr": rates["dense"]})
        if evaluation.step == step:
            self.write(
                {"kind": "eval", "step": step, "seconds": evaluation.last_seconds}
                | evaluation.result()
                | {"best_step": evaluation.best_step}
            )

    def write(self, line: dict[str, Any]) -> None:
        """Write a line to all files and services."""
        self._hold()
        for sink in self._sinks:
            with self._missing.tried(sink.name, self.folder, line["step"]):
                sink.write(line)

    @property
    def missing(self) -> list[str]:
        """A sentence for each part that could not be written."""
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result of the run."""
        if self.folder is not None:
            with self._missing.tried(RESULT, self.folder):
                put_json(self.folder / RESULT, result)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, with the flags from which the model can be made again."""
        if self._lines is not None:  # lines are to be as durable as the checkpoint
            self._hold()
            with self._missing.tried(f"the sync of {METRICS}", self.folder, of=OSError):
                self._lines.sync()
        since = self._since.state_dict()
        return {"folder": self.path, "flags": self._flags, "changes": self._changes, "since": since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint. Go on in its folder, unless another one is named or it is gone."""
        if self._auto and state["folder"] is not None and Path(state["folder"]).is_dir():
            self.folder = Path(state["folder"])
        self._saved_in = state["folder"]
        self._since.load_state_dict(state.get("since", {}))
        self._changes = list(state.get("changes", []))
        self.changed = changes_between(state.get("flags", {}), self._flags)

    def _cut(self, folder: Path) -> Lines:
        """Drop the lines after the step that the run goes on from, and a half line that a kill left.

        Puts a new file in place, so that an older start of the run that is still alive cannot write to it. If the disk is
        full, it truncates the old file instead.
        """
        path, there = folder / METRICS, lines_of(folder)
        kept = sum(1 for line in there if self.begun_at and line["step"] <= self.begun_at)
        whole = b"".join(line + b"\n" for line in path.read_bytes().split(b"\n")[:kept]) if kept else b""
        last = max((line["step"] for line in there[:kept] if line["kind"] == "train"), default=0)
        if last < self._since.step <= self.begun_at and self._saved_in == self.path:
            lacks = f"{METRICS} after step {last:,}, up to {self._since.step:,},"
            self._missing.add(lacks, "the file ends before the checkpoint")
        self._check()
        for draft in folder.glob(f"{METRICS}-*.new"):  # of a start that was killed or is superseded
            draft.unlink(missing_ok=True)
        try:
            lines = Lines(path, whole)
        except OSError:
            self._check()
            with suppress(FileNotFoundError):
                os.truncate(path, len(whole))
            lines = Lines(path)
        try:
            self._check()
        except Superseded:
            lines.close()
            raise
        return lines

    def _hold(self) -> None:
        """Make sure that lines go to the file that can be read.

        If the file was replaced, either a newer start of the run did it, and this one ends, or an older one did, just before
        it found out that it is superseded. Then this puts the file back with all its lines.
        """
        if self._lines is None or not self._lines.gone:
            return
        self._check()
        with suppress(OSError):  # writing the next line reports it
            if not self._lines.again():
                self._missing.add(
                    f"a part of {METRICS}", "an older start of the run on another machine has replaced it"
                )
        self._check()

    def _config(self) -> dict[str, Any]:
        packages = ("torch", "numpy", "numba")
        return {
            "command": "train",
            "flags": self._flags,
            "versions": {"python": python_version(), "skirl": machine()["skirl"]} | {p: version(p) for p in packages},
            "machine": machine(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "begun_at": self.begun_at,
            "trainers": self._trainers,
            "changes": self._changes,
        }


def lines_of(folder: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics, without a half line that a kill left; none if there is no file yet.

    **Arguments**

    - `folder`: the run's folder.
    """
    path = Path(folder) / METRICS
    if not path.exists():
        return []
    data = path.read_bytes()
    lines = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        read: Any = None
        try:
            read = json.loads(line)
        except (ValueError, RecursionError) as error:
            wrong: str | None = " ".join(str(error).split())
        else:
            wrong = misfit(read, LINE)
        if wrong is not None:
            raise ValueError(f"{path}, line {number} is not a line of metrics ({wrong}): fix it, or take it out")
        lines.append(read)
    return lines


LINE = {"kind": TEXT, "step": COUNT}
"""The fields of every line."""


def new_folder(runs: Path, name: str) -> Path:
    """Make a new folder, named after the run and the time."""
    stem = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{runs / stem} and 998 more exist: set run to another folder")


def put_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file with one JSON object, whole or not at all."""
    put_whole(path, (json.dumps(value, indent=1, default=str) + "\n").encode(), "new")
