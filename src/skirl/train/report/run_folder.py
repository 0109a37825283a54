"""The run folder: what a run was, how it went and how it ended, in files that outlive it. README.md here has the format."""

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
from typing import Any

from skirl.checkpoint.starts import Superseded
from skirl.pipeline.lookahead import Lookahead
from skirl.tools.machine import machine
from skirl.tools.sealed_json import put_whole
from skirl.tools.shape_of import COUNT, TEXT, misfit
from skirl.train.evaluation import Evaluation
from skirl.train.flags import RUNS
from skirl.train.meter import Meter
from skirl.train.report.hyperparameters import Table
from skirl.train.report.missing import Missing
from skirl.train.report.since import Since
from skirl.train.report.sinks import Lines, TensorBoard, WandB
from skirl.train.resumed import Change, changes_between

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"


class RunFolder:
    """Writes a run folder. It is part of a checkpoint, so that a resumed run finds it again.

    What cannot be written is missing there, and ends no run: a warning says so, and `missing` has it.

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
        """folder: "none" writes nothing, "auto" makes a new one, named after `name` and the time. trainers: how many. table:
        what differs between this run and others, of each by its name.
        """
        self.folder: Path | None = None if folder in ("none", "auto") else Path(folder)
        self.every = every
        self.begun_at = 0
        """The step that the run goes on from."""
        self.changed: list[Change] = []
        """The flags that are others than those of the run that was saved, from this step on."""
        self._changes: list[Change] = []
        self._auto = folder == "auto"
        self._name, self._flags = name, dict(flags)
        self._wandb, self._trainers, self._table = wandb, trainers, table
        self._missing = Missing()
        self._sinks: list[Any] = []
        self._lines: Lines | None = None
        self._check: Callable[[], None] = lambda: None
        self._since = Since()
        self._saved_in: str | None = None
        """The folder of the run that was saved."""
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"run is {self.folder}, which is a file: set it to a folder")
        if not resume and (self.folder / CONFIG).exists():
            raise ValueError(
                f"run is {self.folder}, which already holds a run: set run to another folder, or go on with "
                "that one: add --resume and its --save"
            )

    def begin(self, batches: Lookahead, meter: Meter, check: Callable[[], None] = lambda: None) -> "RunFolder":
        """Note the step that the run starts at; then enter this.

        check: raises Superseded where a newer start of the run has taken its place, which then has the folder.
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
                self.folder = new_folder(runs, self._name)
        if self.folder is None:
            return self
        folder = self.folder
        self._check()
        try:
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
        if metrics.is_file() and not metrics.stat().st_size:  # nothing came of it: the next try may have the folder
            with suppress(OSError):
                (self.folder / CONFIG).unlink(missing_ok=True)

    @property
    def on(self) -> bool:
        """Whether anything is written anywhere."""
        return bool(self._sinks)

    @property
    def path(self) -> str | None:
        """The folder; None where there is none."""
        return None if self.folder is None else str(self.folder)

    def after_step(
        self, batches: Lookahead, meter: Meter, rates: Mapping[str, float], *, last: bool, evaluation: Evaluation
    ) -> None:
        """A step is over: write what is due. last: of the run."""
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
        """One line, everywhere."""
        self._hold()
        for sink in self._sinks:
            with self._missing.tried(sink.name, self.folder, line["step"]):
                sink.write(line)

    @property
    def missing(self) -> list[str]:
        """What could not be written down, a sentence for each part."""
        return self._missing.told()

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run is over."""
        if self.folder is not None:
            with self._missing.tried(RESULT, self.folder):
                put_json(self.folder / RESULT, result)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: with the flags, the model can be made again."""
        if self._lines is not None:  # lines are to be as durable as the checkpoint
            self._hold()
            with self._missing.tried(f"the sync of {METRICS}", self.folder, of=OSError):
                self._lines.sync()
        since = self._since.state_dict()
        return {"folder": self.path, "flags": self._flags, "changes": self._changes, "since": since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the folder of the run that was saved, unless another one is named or that one is gone."""
        if self._auto and state["folder"] is not None and Path(state["folder"]).is_dir():
            self.folder = Path(state["folder"])
        self._saved_in = state["folder"]
        self._since.load_state_dict(state.get("since", {}))
        self._changes = list(state.get("changes", []))
        self.changed = changes_between(state.get("flags", {}), self._flags)

    def _cut(self, folder: Path) -> Lines:
        """Drop the lines after the step that the run goes on from, and what a kill left of the last one.

        The file is another one then: an older start of the run that lives somewhere writes no more lines into this one. A
        full disk does not stand in the way.
        """
        path, there = folder / METRICS, lines_of(folder)
        kept = sum(1 for line in there if self.begun_at and line["step"] <= self.begun_at)
        whole = b"".join(line + b"\n" for line in path.read_bytes().split(b"\n")[:kept]) if kept else b""
        last = max((line["step"] for line in there[:kept] if line["kind"] == "train"), default=0)
        if last < self._since.step <= self.begun_at and self._saved_in == self.path:
            lacks = f"{METRICS} after step {last:,}, up to {self._since.step:,},"
            self._missing.add(lacks, "the file ends before the checkpoint")
        self._check()
        for draft in folder.glob(f"{METRICS}-*.new"):  # of a start that was killed, or that has nothing to put in place
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
        """See to it that lines go where they can be read.

        Where the file is gone, a newer start of the run has put its own there, and this one ends; or an older one has, the
        moment before it found that it is none, and then all lines come back.
        """
        if self._lines is None or not self._lines.gone:
            return
        self._check()
        with suppress(OSError):  # it is told where a line cannot be written
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
    """The lines of a run's metrics, without a half line that a kill left; none where there is no file yet.

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
            raise ValueError(f"{path}, line {number}: is no line of metrics ({wrong}): mend it, or take it out")
        lines.append(read)
    return lines


LINE = {"kind": TEXT, "step": COUNT}
"""What every line has."""


def new_folder(runs: Path, name: str) -> Path:
    """A folder that was not there, named after the run and the time."""
    stem = f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{runs / stem} and 998 more are there: set run to another folder")


def put_json(path: Path, value: Mapping[str, Any]) -> None:
    """A file of one JSON object, all of it or nothing."""
    put_whole(path, (json.dumps(value, indent=1, default=str) + "\n").encode(), "new")
