"""`skirl report RUN`: the contents of a run folder as text and as a page, also if the run still goes on or was killed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skirl.tools.flags import option
from skirl.tools.os_errors import writing
from skirl.tools.progress import clock, course, figure, hidden
from skirl.tools.sealed_json import AMOUNT, ANY, COUNT, NUMBER, SCORE, TEXT, finite, misfit
from skirl.train.report.lanes import FORM, as_lines, check, draw, of_all
from skirl.train.report.page import Page
from skirl.train.report.plot import Chart
from skirl.train.report.run_folder import CONFIG, METRICS, RESULT, lines_of
from skirl.train.resumed import told

Line = Mapping[str, Any]


FORMS: dict[str, Any] = {
    "train": dict.fromkeys(("step", "samples", "fetched", "new", "written", "touched"), COUNT)
    | dict.fromkeys(("seconds", "samples_per_second", "stall", "read"), AMOUNT)
    | {"loss": NUMBER, "auc": SCORE, "ne": SCORE, "lr": SCORE, "dense_lr": SCORE}
    | {"busy": {...: AMOUNT}, "blame": {...: AMOUNT}},
    "eval": {"step": COUNT, "seconds": AMOUNT, "test_logloss": NUMBER}
    | dict.fromkeys(("test_auc", "test_ne", "test_calibration"), SCORE),
}
"""The fields that are read from a line of each kind."""
OF_CONFIG: dict[str, Any] = {
    "flags": {...: ANY}, "started": TEXT, "begun_at": COUNT, "versions": {...: TEXT},
    "machine": {"processor": ANY, "cores": ANY},
}  # fmt: skip
STAGES = {
    "plan": "planning", "fetch": "fetching rows", "write": "writing rows", "load": "loading into the cache",
    "move": "moving rows between trainers",
}  # fmt: skip
"""Names of the stages on the page."""
OF_RESULT: dict[str, Any] = {
    "checkpoints": {"stopped_by": ANY}, "loss": dict.fromkeys(("first", "last", "mean"), NUMBER)
}  # fmt: skip
LATER: dict[str, Any] = {
    "by_trainer": FORM, "factor": NUMBER,
    "failed": TEXT, "trainers": COUNT, "best": {"folder": TEXT, "step": COUNT}, "missing": [TEXT],
    "changes": [{"flag": TEXT, "was": ANY, "is": ANY, "step": COUNT}],
}  # fmt: skip
"""Optional fields of a config or a result; null counts as absent."""
MOVED = ("touched", "fetched", "new", "written")


@dataclass(frozen=True)
class RunContents:
    """The contents of a run folder."""

    config: Mapping[str, Any]
    lines: Sequence[Line]
    """One line per logged interval."""
    evaluations: Sequence[Line]
    result: Mapping[str, Any] | None
    """None if the run did not end."""

    @classmethod
    def of(cls, folder: Path) -> "RunContents":
        """Read a run's folder."""
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} has no {CONFIG}: name the folder of a run, such as runs/dlrm-synthetic-...")
        path, result = folder / METRICS, folder / RESULT
        by_kind: dict[str, list[Line]] = {kind: [] for kind in FORMS}
        for number, line in enumerate(lines_of(folder), start=1):
            if line["kind"] in FORMS:
                _checked(f"{path}, line {number}", line, FORMS[line["kind"]])
                by_kind[line["kind"]].append(line)
        ended = _checked(str(result), _read(result), OF_RESULT) if result.is_file() else None
        if ended is not None and (found := ended.get("by_trainer")) is not None:
            check(str(result), found)
        return cls(
            config=_checked(str(folder / CONFIG), _read(folder / CONFIG), OF_CONFIG),
            lines=by_kind["train"],
            evaluations=by_kind["eval"],
            result=ended,
        )

    def sums(self, name: str) -> dict[str, float]:
        """Return the seconds of the whole run by stage, added up over the lines' values of this name."""
        sums: dict[str, float] = {}
        for line in self.lines:
            for stage, seconds in line.get(name, {}).items():
                sums[stage] = sums.get(stage, 0.0) + seconds
        return sums

    def sum(self, name: str) -> float:
        """Return the sum of a field over the whole run."""
        return sum(line[name] for line in self.lines)


def report(folder: Path, page: Path | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read the folder of a run, write a page, and return the facts."""
    left = RunContents.of(folder)
    page = page or folder / "report.html"
    numbers = facts(left)
    with writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(drawn(folder.name, left, numbers, defaults).html(), encoding="utf-8", errors="replace")
    return {"command": "report", "run": str(folder), "page": str(page), **numbers}


def facts(left: RunContents) -> dict[str, Any]:
    """Return the run in numbers."""
    last: Line = left.lines[-1] if left.lines else {}
    seconds, stall = left.sum("seconds"), left.sum("stall")
    return {
        "ended": left.result is not None,
        "stopped_by": None if left.result is None else left.result["checkpoints"]["stopped_by"],
        "run_failed": (left.result or {}).get("failed"),
        "missing": (left.result or {}).get("missing"),
        "kept": (left.result or {}).get("best"),
        "losses": (left.result or {}).get("loss"),
        "by_trainer": (left.result or {}).get("by_trainer"),
        "changes": left.config.get("changes") or [],
        "flags": left.config["flags"],
        "steps": last.get("step", 0),
        "samples": last.get("samples", 0),
        "seconds": seconds,
        "samples_per_second": sum(line["samples_per_second"] * line["seconds"] for line in left.lines)
        / max(seconds, 1e-9),
        **{name: last.get(name) for name in ("loss", "auc", "ne", *MOVED)},
        **of_all((left.result or {}).get("by_trainer"), MOVED),
        "factor": (left.result or last).get("factor"),
        "trainers": left.config.get("trainers") or 1,
        "best": min(left.evaluations, key=lambda line: line["test_logloss"], default=None),
        "stall": stall,
        "read": left.sum("read"),
        "busy": left.sums("busy"),
        "blame": left.sums("blame"),
        "hidden": max(
            0.0, 1.0 - (stall + left.sums("busy").get("load", 0.0)) / max(sum(left.sums("busy").values()), 1e-9)
        ),
    }


def as_text(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts as text for a reader, by label."""
    flags, steps = run["flags"], max(1, run["steps"])
    state = f"stopped by {run['stopped_by']}" if run["stopped_by"] else "ended"
    state = state if run["ended"] else "still going on, killed, or failed"
    state = "failed" if run["run_failed"] else state
    lines = {
        "run": f"{flags.get('model')} on {flags.get('data')}, {state}",
        "steps": f"{run['steps']:,}, {run['samples']:,} samples in {clock(run['seconds'])}",
        "speed": f"{run['samples_per_second']:,.0f} samples/s with the first step, evaluations and checkpoints left out",
    }
    lines |= {"failed": str(run["run_failed"])} if run["run_failed"] else {}
    lines |= {"changed": "\n".join(told(run["changes"]))} if run["changes"] else {}
    lines |= {"missing": "\n".join(run["missing"])} if run["missing"] else {}
    if not run["samples"]:
        return {**lines, "metrics": "none yet: a line comes every --log-every steps"}
    lines["loss"] = course(run["losses"]) if run["losses"] else f"{figure(run['loss'])} over the last interval"
    if run["auc"] is not None:
        lines["AUC"] = f"{run['auc']:.4f} of all predictions, each made before its batch was trained on"
    if run["best"] is not None:
        best = run["best"]
        lines["test"] = (
            f"log loss {best['test_logloss']:.4f}, AUC {_number(best['test_auc'])} at step {best['step']:,}, its best"
            + (f"; step {run['kept']['step']:,} is kept in {run['kept']['folder']}" if run["kept"] else "")
        )
    whose = "" if run["trainers"] == 1 or run["by_trainer"] else "of trainer 0: "
    lines["rows"] = (
        f"{whose}{run['touched']:,} touched; {run['fetched'] / steps:,.0f} brought in again, {run['new'] / steps:,.0f} made "
        f"and {run['written'] / steps:,.0f} written a step"
    )
    if run["factor"]:
        lines["factor"] = f"{run['factor']:.1f} times as many ids in lists as were looked up"
    lines["hidden"] = hidden(run["hidden"], run["fetched"] + run["written"])
    lines["waited"] = f"{run['stall']:.2f} s for rows, {run['read']:.2f} s for the loader" + _culprits(run["blame"])
    return lines | as_lines(run["by_trainer"])


def drawn(name: str, left: RunContents, numbers: Mapping[str, Any], defaults: Mapping[str, Any]) -> Page:
    """Return the page of a run."""
    page = Page(f"Run {name}")
    page.facts(as_text(numbers))
    if left.lines:
        page.heading("Learning")
        page.charts(_learning(left))
        page.heading("Speed and movement")
        page.charts(_moving(left))
        if numbers["trainers"] > 1:
            page.note("Rows, and the time that the loop waited, are those of trainer 0.")
        page.heading("Where time went")
        blame = left.sums("blame")
        page.bars(
            {
                STAGES.get(n, n): (seconds, _seconds(seconds, blame.get(n)))
                for n, seconds in left.sums("busy").items()
                if seconds or n != "move"
            }
            | {
                name: (left.sum(what), _seconds(left.sum(what)))
                for name, what in (("waiting for rows", "stall"), ("waiting for the loader", "read"))
            }
        )
        page.note(
            "Planning, fetching and writing run in parallel with the training loop; loading and waiting take its own time. "
            "A stage is to blame for the seconds that it was at work while the loop waited."
        )
    if left.result is not None and left.result.get("by_trainer"):
        draw(page, left.result["by_trainer"])
    if left.evaluations:
        page.heading("Evaluations")
        page.table(
            ["step", "AUC", "log loss", "normalised entropy", "calibration", "seconds"],
            [
                [f"{line['step']:,}", *(_number(line[f"test_{n}"]) for n in ("auc", "logloss", "ne", "calibration")),
                 f"{line['seconds']:.1f}"]
                for line in left.evaluations
            ],
        )  # fmt: skip
    page.heading("Flags")
    flags = left.config["flags"]
    usual = {name for name, value in flags.items() if name in defaults and value == _as_read(defaults[name])}
    page.facts({option(name): _value(value) for name, value in flags.items() if name not in usual})
    page.hidden(
        f"{len(usual)} more at their defaults", {option(name): _value(flags[name]) for name in flags if name in usual}
    )
    page.note(
        f"Begun {left.config['started']}, at step {left.config['begun_at']}. "
        + ", ".join(f"{package} {version}" for package, version in left.config["versions"].items())
        + f". {left.config['machine']['processor']}, {left.config['machine']['cores']} cores."
    )
    return page


def _learning(left: RunContents) -> list[Chart]:
    auc = {"training, so far": _points(left.lines, "auc"), "held out": _points(left.evaluations, "test_auc")}
    loss = {
        "training, each interval": _points(left.lines, "loss"),
        "held out": _points(left.evaluations, "test_logloss"),
    }
    return [_chart("log loss", loss), _chart("AUC", auc)]


def _moving(left: RunContents) -> list[Chart]:
    steps = [0, *(line["step"] for line in left.lines)]
    moved = {}
    for name, what in (("fetched", "brought in again"), ("new", "made"), ("written", "written")):
        counts = [0, *(line[name] for line in left.lines)]
        moved[what] = [
            (float(steps[i + 1]), (counts[i + 1] - counts[i]) / (steps[i + 1] - steps[i]))
            for i in range(len(left.lines))
            if steps[i + 1] > steps[i]
        ]
    waits = {
        "for rows": [(float(x["step"]), 100 * x["stall"] / max(x["seconds"], 1e-9)) for x in left.lines],
        "for the loader": [(float(x["step"]), 100 * x["read"] / max(x["seconds"], 1e-9)) for x in left.lines],
    }
    rates = {"rows": _points(left.lines, "lr"), "dense": _points(left.lines, "dense_lr")}
    shared = [line for line in left.lines if line.get("factor")]
    return [
        _chart("samples a second", {"samples": _points(left.lines, "samples_per_second")}),
        _chart("rows a step", moved),
        _chart("% of the time that the loop waited", waits),
        _chart("learning rate", rates),
        *([_chart("ids in lists, over those looked up", {"factor": _points(shared, "factor")})] if shared else []),
    ]


def _chart(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    drawn_lines = {name: points for name, points in lines.items() if points}
    return Chart(title, "step", drawn_lines or {"none yet": [(0.0, 0.0)]}, log=(False, False), dots=False)


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [(float(line["step"]), float(line[name])) for line in lines if finite(line[name])]


def _culprits(blame: Mapping[str, float]) -> str:
    worst = max(blame, key=lambda stage: blame[stage], default=None)
    if worst is None or blame[worst] < 0.005:
        return ""
    return f"; {worst} was at work for {blame[worst]:.2f} s of the wait for rows"


def _value(value: Any) -> str:
    """Return a flag's value as text."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)


def _as_read(value: Any) -> Any:
    """Return a default as it would be read from config.json."""
    return json.loads(json.dumps(value, default=str))


def _seconds(seconds: float, blamed: float | None = None) -> str:
    return f"{seconds:,.2f} s" + (
        f", {blamed:,.2f} s of them while the loop waited" if blamed and blamed >= 0.005 else ""
    )


def _number(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}), and a report needs it: name another run") from error


def _checked(where: str, read: Any, expected: Any) -> Any:
    wrong = misfit(read, expected)
    if wrong is None and isinstance(read, Mapping):
        there = {name: form for name, form in LATER.items() if read.get(name) is not None}
        wrong = misfit(read, there)
    if wrong is not None:
        raise ValueError(f"{where} is damaged, or was written by another version of skirl ({wrong}): name another run")
    return read
