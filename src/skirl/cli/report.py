"""`skirl report`: the folder of a run or a sweep as text and as a page, also if it still goes on or was killed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from skirl.cli import show
from skirl.cli.page import Chart, Table, write_page
from skirl.tools.flags import flags_of, option
from skirl.tools.sealed_json import finite
from skirl.tools.units import clock, figure
from skirl.train.resume import shown, told
from skirl.train.run_folder import CONFIG, RESULT, lines_of

Line = Mapping[str, Any]
Points = list[tuple[float, float]]

MOST_LANES = 8
"""Most trainers with a line on a terminal."""
LANE = ("touched", "fetched", "written", "sent", "seconds", "waited", "stall", "read", "peak_bytes")
"""What is shown of each trainer: rows and bytes, its seconds, and for how many it waited for others, rows, the loader."""
MOVED = ("touched", "fetched", "new", "written")


@dataclass(frozen=True)
class Report:
    """Summarize what a run or a sweep did, and write a page about it."""

    folder: Positional[Path]
    """The folder of the run or the sweep."""
    page: Path | None = None
    """Where to write the page; report.html in that folder if not given."""
    json: bool = False
    """Print the facts as one line of JSON."""

    def run(self) -> dict[str, Any]:
        if (self.folder / "sweep.json").is_file():
            from skirl.cli.sweep_report import report as report_of_sweep

            return report_of_sweep(self.folder, self.page)
        return report(self.folder, self.page)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        if result["command"] == "report of a sweep":
            from skirl.cli.sweep_report import as_text as text_of_sweep

            return text_of_sweep(result) | {"page": result["page"]}
        return as_text(result) | {"page": result["page"]}


@dataclass(frozen=True)
class RunContents:
    """The contents of a run folder."""

    config: Mapping[str, Any]
    lines: Sequence[Line]
    """One line per logged interval."""
    evaluations: Sequence[Line]
    result: Mapping[str, Any]
    """Empty if the run did not end."""

    @classmethod
    def of(cls, folder: Path) -> "RunContents":
        if not (folder / CONFIG).is_file():
            raise ValueError(f"{folder} has no {CONFIG}: name the folder of a run, such as runs/dlrm-synthetic-...")
        lines = lines_of(folder)
        train, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
        result = _read(folder / RESULT) if (folder / RESULT).is_file() else {}
        return cls(_read(folder / CONFIG), train, evaluations, result)

    def sum(self, name: str) -> float:
        return sum(line[name] for line in self.lines)

    def sums(self, name: str) -> dict[str, float]:
        """Return the sums over the whole run of a field that has seconds by stage."""
        stages = dict.fromkeys(stage for line in self.lines for stage in line[name])
        return {stage: sum(line[name].get(stage, 0.0) for line in self.lines) for stage in stages}


def report(folder: Path, page: Path | None) -> dict[str, Any]:
    """Read the folder of a run, write a page, and return the facts."""
    left = RunContents.of(folder)
    try:
        page, run = page or folder / "report.html", facts(left)
        lead, tables, charts = [*_lead(run)], [*_tables(left, run)], [*_charts(left)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{folder} has a damaged file, or one of another version of skirl ({wrong}): name another run"
        ) from error
    write_page(page, title=f"Run {folder.name}", lead=lead, tables=tables, charts=charts)
    return {"command": "report", "run": str(folder), "page": str(page), **run}


def facts(left: RunContents) -> dict[str, Any]:
    last: Line = left.lines[-1] if left.lines else {}
    seconds, stall, busy, result = left.sum("seconds"), left.sum("stall"), left.sums("busy"), left.result
    samples = sum(line["samples_per_second"] * line["seconds"] for line in left.lines)
    lanes = (result.get("by_trainer") or {}).get("lanes", [])
    return {
        "ended": bool(result),
        "stopped_by": result["checkpoints"]["stopped_by"] if result else None,
        "run_failed": result.get("failed"),
        "missing": result.get("missing"),
        "kept": result.get("best"),
        "losses": result.get("loss"),
        "by_trainer": result.get("by_trainer"),
        "changes": left.config.get("changes") or [],
        "flags": left.config["flags"],
        "steps": last.get("step", 0),
        "samples": last.get("samples", 0),
        "seconds": seconds,
        "samples_per_second": samples / max(seconds, 1e-9),
        **{name: last.get(name) for name in ("loss", "auc", "ne", *MOVED)},
        **({name: sum(lane[name] for lane in lanes) for name in MOVED} if lanes else {}),
        "trainers": left.config.get("trainers") or 1,
        "best": min(left.evaluations, key=lambda line: line["test_logloss"], default=None),
        "last": left.evaluations[-1] if left.evaluations else None,
        "stall": stall,
        "read": left.sum("read"),
        "busy": busy,
        "blame": left.sums("blame"),
        "hidden": max(0.0, 1.0 - (stall + busy.get("load", 0.0)) / max(sum(busy.values()), 1e-9)),
    }


def run_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run that has ended from its result, for `as_text`."""
    kept = (
        "steps",
        "samples",
        "seconds",
        "samples_per_second",
        "auc",
        "logloss",
        "ne",
        "calibration",
        "missing",
        "changes",
    )
    kept = (*kept, "by_trainer", "trainers")
    return {
        **result["counters"], **result["movement"], **{name: result[name] for name in kept},
        "flags": result, "ended": True, "stopped_by": result["checkpoints"]["stopped_by"], "run_failed": result["failed"],
        "losses": result["loss"], "touched": result["rows"]["touched"], "best": None, "blame": {},
    }  # fmt: skip


def as_text(run: Mapping[str, Any]) -> dict[str, str]:
    flags, steps, best = run["flags"], max(1, run["steps"]), run["best"]
    state = f"stopped by {run['stopped_by']}" if run["stopped_by"] else "ended"
    state = "failed" if run["run_failed"] else state if run["ended"] else "still going on, killed, or failed"
    lines = {
        "run": f"{flags.get('model')} on {flags.get('data')}, {state}",
        "steps": f"{run['steps']:,}, {run['samples']:,} samples in {clock(run['seconds'])}",
        "speed": f"{run['samples_per_second']:,.0f} samples/s without evaluations and checkpoints",
        **show.facts({"failed": run["run_failed"], "changed": "\n".join(told(run["changes"]))}),
        **show.facts({"missing": "\n".join(run["missing"] or [])}),
    }
    if not run["samples"]:
        return {**lines, "metrics": "none yet: a line comes every --log-every steps"}
    lines["loss"] = show.course(run["losses"]) if run["losses"] else f"{figure(run['loss'])} over the last interval"
    lines["metrics"] = f"{show.scores(run)} of all predictions, each made before its batch was trained on"
    if best is not None:
        kept = f"; step {run['kept']['step']:,} is kept in {run['kept']['folder']}" if run["kept"] else ""
        auc = _number(best["test_auc"])
        lines["test"] = f"log loss {best['test_logloss']:.4f}, AUC {auc} at step {best['step']:,}, its best{kept}"
    moved = ", ".join(f"{run[name] / steps:,.0f} {name}" for name in MOVED[1:])
    lines["rows"] = f"{run['touched']:,} touched; {moved} a step"
    lines["hidden"] = show.hidden(run["hidden"], run["fetched"] + run["written"])
    worst = max(run["blame"], key=run["blame"].__getitem__, default=None)
    blame = f", most of it for {worst}" if worst and run["stall"] >= 0.005 else ""
    lines["waited"] = f"{run['stall']:.2f} s for rows{blame}, {run['read']:.2f} s for the loader"
    return lines | lanes_text(run["by_trainer"])


def lanes_text(found: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a line for each trainer, where there are several."""
    lanes = [] if found is None else found["lanes"]
    lines = {
        f"trainer {n}": show.text({name: lane[name] for name in LANE}) for n, lane in enumerate(lanes[:MOST_LANES])
    }
    more = {"trainers": f"{len(lanes) - MOST_LANES} more: skirl report shows all"} if len(lanes) > MOST_LANES else {}
    return lines | more


def _lead(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came of the run, and whether it overfits; then where its time went."""
    text, best, last = as_text(run), run["best"], run["last"]
    if best is None:
        yield f"{text['run']}: {text.get('loss', text.get('metrics'))}."
    else:
        yield f"{text['run']}: held-out {text['test']}."
        if best["step"] != last["step"]:
            grown = f"from {best['test_logloss']:.4f} to {last['test_logloss']:.4f} by step {last['step']:,}"
            yield f"It overfits: after step {best['step']:,}, held-out log loss rose {grown}."
    yield f"{text['speed']}."
    if "waited" in text:
        yield f"The loop waited {text['waited']}."


def _tables(left: RunContents, run: Mapping[str, Any]) -> Iterator[Table]:
    from skirl.cli.train import Train

    yield Table(["", ""], [[name, text] for name, text in as_text(run).items()])
    if left.lines:
        times = [[name, f"{s:,.2f}", f"{run['blame'].get(name, 0.0):,.2f}"] for name, s in run["busy"].items() if s]
        waits = (("waiting for rows", run["stall"]), ("waiting for the loader", run["read"]))
        times += [[name, f"{seconds:,.2f}", "-"] for name, seconds in waits]
        whose = " of trainer 0" if run["trainers"] > 1 else ""
        yield Table(["", "seconds", "of them while the loop waited"], times, f"Where the time went{whose}")
    if run["by_trainer"]:
        lanes = [
            [str(n), *(show.text(of[name], name) for name in LANE)] for n, of in enumerate(run["by_trainer"]["lanes"])
        ]
        yield Table(["trainer", *LANE], lanes, "Trainers: the others wait for one that waits little for them")
    if left.evaluations:
        scores = ("auc", "logloss", "ne", "calibration")
        rows = [[f"{e['step']:,}", *(_number(e[f"test_{n}"]) for n in scores)] for e in left.evaluations]
        yield Table(["step", "AUC", "log loss", "normalised entropy", "calibration"], rows, "Evaluations")
    config, machine = left.config, left.config["machine"]
    about = [*config["versions"].items(), ("processor", f"{machine['processor']}, {machine['cores']} cores")]
    yield Table(["", ""], [*about, ("begun", f"{config['started']}, at step {config['begun_at']}")], "Where it ran")
    usual = {n: json.loads(json.dumps(flag.default, default=str)) for n, flag in flags_of(Train).items()}
    changed = [[option(n), shown(v)] for n, v in run["flags"].items() if n not in usual or v != usual[n]]
    yield Table(["flag", "value"], changed, "Set")


def _charts(left: RunContents) -> Iterator[Chart]:
    lines, evaluations = left.lines, left.evaluations
    loss = {"training, each interval": _points(lines, "loss"), "held out": _points(evaluations, "test_logloss")}
    yield Chart("Log loss", loss, "step", "")
    auc = {"training, so far": _points(lines, "auc"), "held out": _points(evaluations, "test_auc")}
    yield Chart("AUC", auc, "step", "")
    yield Chart("Samples a second", {"samples": _points(lines, "samples_per_second")}, "step", "")
    moved: dict[str, Points] = {}
    for name, label in (("fetched", "fetched again"), ("new", "made"), ("written", "written")):
        counts = [(0, 0), *((line["step"], line[name]) for line in lines)]
        pairs = pairwise(counts)
        moved[label] = [(step, (count - was) / (step - since)) for (since, was), (step, count) in pairs if step > since]
    yield Chart("Rows a step", moved, "step", "")
    waits: dict[str, Points] = {
        label: [(line["step"], 100 * line[name] / max(line["seconds"], 1e-9)) for line in lines]
        for label, name in (("for rows", "stall"), ("for the loader", "read"))
    }
    yield Chart("Time that the loop waited", waits, "step", "%")
    yield Chart("Learning rate", {"rows": _points(lines, "lr"), "dense": _points(lines, "dense_lr")}, "step", "")


def _points(lines: Sequence[Line], name: str) -> Points:
    return [(line["step"], line[name]) for line in lines if finite(line[name])]


def _number(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}), and a report needs it: name another run") from error
