"""The run folder: what a run was, how it went and how it ended, in files that outlive it. README.md here has the format."""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from types import TracebackType
from typing import Any

from skirl.pipeline.lookahead import Lookahead
from skirl.tools.machine import machine
from skirl.tools.shape_of import COUNT, TEXT, misfit
from skirl.train.evaluation import Evaluation
from skirl.train.flags import RUNS
from skirl.train.meter import Meter

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"


class RunFolder:
    """Writes a run folder. It is part of a checkpoint, so that a resumed run finds it again.

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
    ) -> None:
        """folder: "none" writes nothing, "auto" makes a new one, named after `name` and the time."""
        self.folder: Path | None = None if folder in ("none", "auto") else Path(folder)
        self.every = every
        self.begun_at = 0
        """The step that the run goes on from."""
        self._auto = folder == "auto"
        self._name, self._flags = name, dict(flags)
        self._wandb = wandb
        self._sinks: list[Any] = []
        self._file: Any = None
        self._since = _Since()
        if self.folder is not None and not resume and (self.folder / CONFIG).exists():
            raise ValueError(
                f"{self.folder} already holds a run: set run to another folder, or go on with it by resume"
            )

    def begin(self, batches: Lookahead, meter: Meter) -> "RunFolder":
        """Note the step that the run starts at; then enter this."""
        self.begun_at = batches.step
        self._since.begin(batches, meter)
        return self

    def __enter__(self) -> "RunFolder":
        if self._wandb is not None:
            self._sinks.append(_WandB(self._wandb, self._name, self._flags))
        if self._auto and self.folder is None:
            self.folder = _new_folder(Path(os.environ.get(RUNS) or "runs"), self._name)
        if self.folder is None:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / CONFIG, self._config())
        (self.folder / RESULT).unlink(missing_ok=True)
        kept = [line for line in lines_of(self.folder) if self.begun_at and line["step"] <= self.begun_at]
        _replace(self.folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in kept))
        self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        self._sinks.append(_TensorBoard(self.folder, self.begun_at))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close()
        if kind is None or not issubclass(kind, Exception) or self.folder is None:
            return
        metrics = self.folder / METRICS
        if metrics.is_file() and not metrics.stat().st_size:  # nothing came of it: the next try may have the folder
            (self.folder / CONFIG).unlink(missing_ok=True)

    @property
    def on(self) -> bool:
        """Whether anything is written anywhere."""
        return bool(self._file or self._sinks)

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
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        numbers = {tag: value for tag, value in _tagged(line) if isinstance(value, int | float)}
        for sink in self._sinks:
            sink.write(numbers, line["step"])

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run is over."""
        if self.folder is not None:
            _write(self.folder / RESULT, result)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"folder": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the folder of the run that was saved, unless another one is named or that one is gone."""
        if self._auto and state["folder"] is not None and Path(state["folder"]).is_dir():
            self.folder = Path(state["folder"])

    def _config(self) -> dict[str, Any]:
        packages = ("torch", "numpy", "numba")
        return {
            "command": "train",
            "flags": self._flags,
            "versions": {"python": python_version(), "skirl": machine()["skirl"]} | {p: version(p) for p in packages},
            "machine": machine(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "begun_at": self.begun_at,
        }


class _Since:
    """Makes lines of what happened since the line before."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}
        self._steps = self._samples = 0
        self._losses = 0.0
        self._at = 0.0

    def begin(self, batches: Lookahead, meter: Meter) -> None:
        """The next line counts from here."""
        self._seconds = _seconds_of(batches)
        self._steps, self._samples, self._losses = meter.steps, meter.samples, meter.losses
        self._at = meter.seconds

    def line(self, batches: Lookahead, meter: Meter) -> dict[str, Any]:
        """What happened since."""
        engine, now, moved = batches.engine, _seconds_of(batches), batches.engine.counters
        spent = {name: seconds - self._seconds.get(name, 0.0) for name, seconds in now.items()}
        steps, samples = meter.steps - self._steps, meter.samples - self._samples
        seconds = meter.seconds - self._at
        loss = (meter.losses - self._losses) / max(1, steps)
        self.begin(batches, meter)
        busy, blame = ({stage: spent[kind, stage] for stage in times} for kind, times in _stages(batches).items())
        total = sum(busy.values())
        scores = asdict(meter.metrics.scores())
        del scores["samples"]
        return {
            "kind": "train",
            "step": batches.step,
            "samples": meter.samples,
            "seconds": seconds,
            "samples_per_second": samples / max(seconds, 1e-9),
            "loss": loss,
            **scores,
            **{name: getattr(moved, name) for name in ("fetched", "new", "written", "forwarded")},
            "touched": len(engine.seen),
            "filled": sum(c.filled for c in engine.caches) / max(1, sum(len(c) for c in engine.caches)),
            "hidden": max(0.0, 1.0 - (spent["loop", "stall"] + busy["load"]) / total) if total else 1.0,
            "stall": spent["loop", "stall"],
            "read": spent["loop", "read"],
            "busy": busy,
            "blame": blame,
            "window": batches.window,
        }


class _TensorBoard:
    """The event file; torch's writer is imported when there is a run to write, 0.6 s after torch."""

    def __init__(self, folder: Path, begun_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = begun_at + 1 if begun_at else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        for tag, value in numbers.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """Weights & Biases, where it is asked for."""

    def __init__(self, project: str, name: str, flags: Mapping[str, Any]) -> None:
        try:
            module = import_module("wandb")
        except ImportError:
            raise ValueError("wandb is set, and the package is not there: pip install wandb, or leave it out") from None
        self._run = module.init(project=project, name=name, config=dict(flags))

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


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
GROUPS = {
    "rows": ("fetched", "new", "written", "forwarded", "touched", "filled", "window"),
    "time": ("samples_per_second", "seconds", "hidden", "stall", "read"),
    "rate": ("lr", "dense_lr"),
}


def _tagged(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The numbers of a line under the names that TensorBoard groups by.

    >>> _tagged({"kind": "train", "step": 3, "loss": 0.5, "lr": 0.1, "busy": {"plan": 2.0}})
    [('train/loss', 0.5), ('rate/lr', 0.1), ('busy/plan', 2.0)]
    """
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    tagged: list[tuple[str, Any]] = []
    for name, value in line.items():
        if name in ("kind", "step"):
            continue
        if isinstance(value, Mapping):
            tagged += [(f"{name}/{inner}", number) for inner, number in value.items()]
        elif line["kind"] == "eval":
            tagged.append((f"test/{name.removeprefix('test_')}", value))
        else:
            tagged.append((f"{group_of.get(name, 'train')}/{name}", value))
    return tagged


def _stages(batches: Lookahead) -> dict[str, dict[str, float]]:
    return {"busy": batches.times.busy, "blame": batches.times.blame}


def _seconds_of(batches: Lookahead) -> dict[tuple[str, str], float]:
    """Every time there is, by kind and stage."""
    times = batches.times
    loop = {("loop", "stall"): times.stall, ("loop", "read"): times.read}
    return loop | {(kind, stage): s for kind, stages in _stages(batches).items() for stage, s in stages.items()}


def _new_folder(runs: Path, name: str) -> Path:
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


def _write(path: Path, value: Mapping[str, Any]) -> None:
    _replace(path, json.dumps(value, indent=1, default=str) + "\n")


def _replace(path: Path, text: str) -> None:
    """All of it or nothing, whenever the run is killed."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
