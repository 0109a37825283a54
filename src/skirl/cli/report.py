"""`skirl report`: the folder of a run or a sweep as text and as a page, also if it still goes on or was killed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skirl.checkpoint.folder import BEST
from skirl.cli.show import Chart, ShowFlags, Table, columns, facts, scores, write_page
from skirl.tools.flags import check_new, flags_of, option
from skirl.tools.units import clock, figure, size
from skirl.train.resume import shown, told
from skirl.train.run_folder import CONFIG, RESULT, WORDS, lines_of

Line = Mapping[str, Any]
SCORES = ("logloss", "calibration")
COUNTED = ("steps", "samples", "loss", "auc", "ne", *SCORES)
"""What a checkpoint carries over a resume."""
MOVED = ("touched", "fetched", "new", "written", "forwarded")
SWEEP, RACE = "sweep.json", "race.jsonl"
MEANS = "ranks are by the mean over the seeds of each configuration, then by each seed"
"""The note under a table in which seeds are pooled: a rank may have a higher loss than the next one."""
LEFT = "of a variant that left, all is as it was then"
JUDGED = "ranks are by held-out loss; loss is of training, each batch before it was trained on"
KEPT_IN, NOT_KEPT = "kept in {}", "which is not kept: --keep-best keeps the best in --save"
UNKNOWN = "still going on, killed, or failed"


@dataclass(frozen=True)
class Report(ShowFlags):
    positional: ClassVar[tuple[str, ...]] = ("folder",)

    folder: Path
    """The folder of the run or the sweep."""
    out: Path | None = None
    """The page to write; report.html in that folder if not given."""
    force: bool = False
    """Replace the page that --out names if it exists."""

    def __post_init__(self) -> None:
        check_new(self.out, self.force)

    def run(self) -> dict[str, Any]:
        report = report_of_sweep if (self.folder / SWEEP).is_file() else report_of_run
        return report(self.folder, self.out or self.folder / "report.html")

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = run_lines(result) if result["command"] == "report" else sweep_lines(result) | race_line(result)
        return lines | {"page": result["page"]}


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}), and a report needs it: name another run") from error


def _by_kind(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    train, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("train", "eval"))
    return train, evaluations


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in lines
        if line.get(name) is not None and math.isfinite(line[name])
    ]


def _figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else figure(value, digits)


# A run


def report_of_run(folder: Path, page: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: name the folder of a run, such as runs/dlrm-synthetic-...")
    lines, evaluations = _by_kind(lines_of(folder))
    config, result = _read(folder / CONFIG), _read(folder / RESULT)
    try:
        run = run_facts(config, lines, evaluations, result)
        if result:
            whole = facts_of_result(result)
            kept = (*run, *SCORES) if not config["begun_at"] else COUNTED  # its times are those of the last part alone
            run |= {name: whole[name] for name in kept if name in whole}
        tables, charts = [*_tables(config, run, lines, evaluations)], [*_charts(lines, evaluations)]
        write_page(page, title=f"Run {folder.name}", lead=[*_lead(run)], tables=tables, charts=charts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{folder} has a damaged file, or one of another version of skirl ({wrong}): name another run"
        ) from error
    own = {"command": "report", "failed": None, "run": str(folder), "page": str(page)}
    return {**result, **(run["last"] or {}), **run, **own}


def run_facts(
    config: Mapping[str, Any], lines: Sequence[Line], evaluations: Sequence[Line], result: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a run did so far; the result of one that did not end is empty."""

    def total(name: str) -> float:
        return sum(line[name] for line in lines)

    def by_stage(name: str) -> dict[str, float]:
        stages = dict.fromkeys(stage for line in lines for stage in line[name])
        return {stage: sum(line[name].get(stage, 0.0) for line in lines) for stage in stages}

    last: Line = lines[-1] if lines else {}
    seconds, stall, busy = total("seconds"), total("stall"), by_stage("busy")
    samples = sum(line["samples_per_second"] * line["seconds"] for line in lines)
    lanes = (result.get("by_trainer") or {}).get("lanes", [])
    return {
        "ended": bool(result), "stopped_by": result["checkpoints"]["stopped_by"] if result else None,
        "run_failed": result.get("failed"), "missing": result.get("missing"), "kept": result.get("best"),
        "loss": result.get("loss"), "interval_loss": last.get("loss"), "by_trainer": result.get("by_trainer"),
        "changes": config.get("changes") or [],
        "flags": config["flags"], "steps": last.get("step", 0), "samples": last.get("samples", 0),
        "seconds": seconds, "samples_per_second": result.get("samples_per_second") or samples / max(seconds, 1e-9),
        **{name: last.get(name) for name in ("auc", "ne", *MOVED)},
        **({name: sum(lane[name] for lane in lanes) for name in MOVED} if lanes else {}),
        "trainers": config.get("trainers") or 1, "last": evaluations[-1] if evaluations else None,
        "stall": stall, "read": total("read"), "busy": busy, "blame": by_stage("blame"),
        "hidden": max(0.0, 1.0 - (stall + busy.get("load", 0.0)) / max(sum(busy.values()), 1e-9)),
    }  # fmt: skip


def facts_of_result(result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **result, **result["counters"], **result["movement"],
        "flags": result, "ended": True, "stopped_by": result["checkpoints"]["stopped_by"], "run_failed": result["failed"],
        "touched": result["rows"]["touched"], "kept": result["best"],
        "last": result if "test_step" in result else None,
    }  # fmt: skip


def run_lines(run: Mapping[str, Any]) -> dict[str, str]:
    flags, steps = run["flags"], max(1, run["steps"])
    state = f"stopped by {run['stopped_by']}" if run["stopped_by"] else "ended" if run["ended"] else UNKNOWN
    took, begun = f"in {clock(run['seconds'])}", run.get("begun_at")  # a report adds up what it took before a resume
    took = f"; the last {run['steps'] - begun:,} steps {took}" if begun else f" {took}"
    lines = held_out_lines(run["last"], run["kept"], flags.get("save")) | {
        "run": f"{flags.get('model')} on {flags.get('data')}, {'failed' if run['run_failed'] else state}",
        "steps": f"{run['steps']:,}, {run['samples']:,} samples{took}",
        "speed": f"{run['samples_per_second']:,.0f} samples/s after the first step, without evaluations and checkpoints",
        **facts({"failed": run["run_failed"], "changed": "\n".join(told(run["changes"]))}),
        **facts({"missing": "\n".join(run["missing"] or [])}),
    }
    if not run["samples"]:
        return {**lines, "metrics": "none yet: a line comes every --log-every steps"}
    if run["loss"]:
        first, last, mean = (figure(run["loss"][name]) for name in ("first", "last", "mean"))
        lines["loss"] = f"{first} for the first batch, {last} for the last, {mean} on average"
    else:
        lines["loss"] = f"{figure(run['interval_loss'])} over the last interval"
    before = "its batch was trained on" if flags.get("epochs", 1) == 1 else "this pass trained on its batch"
    lines["metrics"] = f"{scores(run)} of all predictions, each made before {before}"
    moved = {name: f"{run[name] / steps:,.0f} {word}" for name, word in WORDS.items()}
    if run["forwarded"]:
        moved["fetched"] += f" ({run['forwarded'] / run['fetched']:.0%} of them from the write-back queue)"
    lines["rows"] = f"{run['touched']:,} touched; {', '.join(moved.values())} a step"
    if run["fetched"] + run["written"]:
        lines["hidden"] = f"{run['hidden']:.0%} of the movement, behind compute"
    worst = max(run["blame"], key=run["blame"].__getitem__, default=None)
    blame = f", most of it for {worst}" if worst and run["stall"] >= 0.005 else ""
    lines["waited"] = f"{run['stall']:.2f} s for rows{blame}, {run['read']:.2f} s for the loader"
    if (seconds := run.get("compiled", 0.0)) >= 0.5:
        lines["waited"] += f"; {seconds:.1f} s of the run compiled kernels, which the next one finds"
    lanes = run["by_trainer"]["lanes"] if run["by_trainer"] else []
    return lines | {
        f"trainer {n}": ", ".join(f"{lane[name]:,} {word}" for name, word in {"touched": "touched", **WORDS}.items())
        + f"; {size(lane['sent'])} sent; in {clock(lane['seconds'])} it waited {lane['waited']:.2f} s for others, "
        + f"{lane['stall']:.2f} s for rows, {lane['read']:.2f} s for the loader; {size(lane['peak_bytes'])} at its peak"
        for n, lane in enumerate(lanes)
    }


def held_out_lines(last: Line | None, kept: Line | None, save: Any = None) -> dict[str, str]:
    if last is None:
        return {}
    at, best, loss = last["test_step"], last["best_step"], _figure(last["best_logloss"])
    lines = {"test": f"{scores(last, 'test_')} on {last['test_samples']:,} samples held out, at step {at:,}"}
    if kept is not None:
        lines["best"] = (
            f"step {kept['step']:,}, log loss {_figure(kept['test_logloss'])}, {KEPT_IN.format(kept['folder'])}"
        )
    elif best < at:
        there = None if save is None else Path(save) / BEST
        lines["best"] = (
            f"step {best:,}, log loss {loss}, {KEPT_IN.format(there) if there and there.is_dir() else NOT_KEPT}"
        )
    return lines


def _lead(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came of the run, and whether it overfits."""
    lines, last = run_lines(run), run["last"]
    yield f"{lines['run']}: {lines.get('test') or lines.get('loss') or lines['metrics']}."
    if last is not None and last["best_step"] != last["test_step"]:
        grown = f"from {_figure(last['best_logloss'])} to {last['test_logloss']:.4f} by step {last['test_step']:,}"
        yield f"It overfits: after step {last['best_step']:,}, held-out log loss rose {grown}."


def _tables(
    config: Mapping[str, Any], run: Mapping[str, Any], lines: Sequence[Line], evaluations: Sequence[Line]
) -> Iterator[Table]:
    from skirl.cli.train import Train

    yield Table(["", ""], [*run_lines(run).items()])
    if lines:
        times = [(name, f"{s:,.2f}", f"{run['blame'].get(name, 0.0):,.2f}") for name, s in run["busy"].items() if s]
        waits = (("waiting for rows", run["stall"]), ("waiting for the loader", run["read"]))
        times += [(name, f"{seconds:,.2f}", "-") for name, seconds in waits]
        whose = " of trainer 0" if run["trainers"] > 1 else ""
        yield Table(["", "seconds", "of them while the loop waited"], times, f"Where the time went{whose}")
    if evaluations:
        names = {"auc": "AUC", "logloss": "log loss", "ne": "normalised entropy", "calibration": "calibration"}
        rows = [[f"{e['step']:,}", *(_figure(e[f"test_{name}"]) for name in names)] for e in evaluations]
        yield Table(["step", *names.values()], rows, "Evaluations")
    began = f"{config['started']}, at step {config['begun_at']}"
    yield Table(["", ""], [*config["versions"].items(), ("begun", began)], "Where it ran")
    usual = {n: json.loads(json.dumps(flag.default, default=str)) for n, flag in flags_of(Train).items()}
    changed = [[option(n), shown(v)] for n, v in config["flags"].items() if n not in usual or v != usual[n]]
    yield Table(["flag", "value"], changed, "Set")


def _charts(lines: Sequence[Line], evaluations: Sequence[Line]) -> Iterator[Chart]:
    loss = {"training, each interval": _points(lines, "loss"), "held out": _points(evaluations, "test_logloss")}
    yield Chart("Log loss", loss)
    auc = {"training, so far": _points(lines, "auc"), "held out": _points(evaluations, "test_auc")}
    yield Chart("AUC", auc)
    yield Chart("Samples a second", {"samples": _points(lines, "samples_per_second")})


# A sweep


def standing(places: Sequence[Mapping[str, Any]], aucs: Mapping[str, float | None]) -> list[tuple[str, ...]]:
    """Return the head of the table and a line for each place, cell by cell; held-out losses only if ranks are by them.

    aucs: of variants on the samples held out.
    """
    from skirl.sweep.race import VariantPlace, difference

    judged = any(at.get("held_out") is not None for at in places)
    pooled = any(at.get("mean") is not None for at in places)
    by = ["held_out"] * judged + ["loss"] + ["mean"] * pooled
    heads = {"held_out": "lowest held out", "loss": "loss", "mean": "mean of seeds"}
    kind = "last held-out AUC" if any(auc is not None for auc in aucs.values()) else "AUC"
    lines: list[tuple[str, ...]] = [("rank", "variant", *(heads[name] for name in by), "loss to rank 1", kind, "state")]
    for at in places:
        losses = (_figure(at.get(name), 5) for name in by)
        behind = difference(VariantPlace(**{name: value for name, value in at.items() if name != "auc"}))
        auc = at["auc"] if kind == "AUC" else aucs.get(at["variant"])
        lines.append((str(at["rank"]), at["variant"], *losses, behind, _figure(auc), at["state"]))
    return lines


def best_line(
    place: Mapping[str, Any], best: Mapping[str, Any] | None = None, save: Any = None, saved: int | None = None
) -> str:
    """Return rank 1 with what it is ranked by, as text."""
    if place.get("held_out") is None:
        loss = "no loss yet" if place["loss"] is None else f"loss {figure(place['loss'], 5)}"
        return f"{place['variant']}, {loss} on samples that nobody had trained on"
    there = Path(save) / place["variant"] / BEST if save else None
    folder = best["folder"] if best and best["folder"] else there if there and there.is_dir() else None
    if folder is None and save and best is not None and best["step"] == saved:
        folder = Path(save) / place["variant"]
    kept = KEPT_IN.format(folder) if folder else NOT_KEPT
    at = "" if best is None else f", at step {best['step']:,}, {kept}"
    return f"{place['variant']}, log loss {figure(place['held_out'], 5)} on the samples held out{at}"


def report_of_sweep(folder: Path, page: Path) -> dict[str, Any]:
    sweep, result = _read(folder / SWEEP), _read(folder / RESULT)
    try:
        data = (folder / RACE).read_bytes() if (folder / RACE).is_file() else b""
        race = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]  # the last may be half a line
        left, standings = ([line for line in race if line["event"] == event] for event in ("left", "standing"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / RACE} is damaged ({error!r}), and a report needs it: name another sweep") from None
    ends = [one for one, after in zip(standings, [*standings[1:], {}]) if one["begun_at"] != after.get("begun_at")]
    facts = {
        "command": "report of a sweep", "sweep": str(folder), "page": str(page),
        "flags": sweep["flags"], "started": sweep["started"], "ended": bool(result),
        **{name: result.get(name) for name in ("winner", "failed", "stopped_by", "best", "cost", "from")},
        **{name: result.get(name) for name in ("seed_noise", "saved_step")},
        "measure": standings[-1]["measure"] if standings else None,
        "variants": [variant["name"] for variant in sweep["variants"]], "left": left,
        "step": result.get("steps") or (standings[-1]["step"] if standings else 0),
        "seconds": sum(one["seconds"] for one in ends),
        "standing": standings[-1]["places"] if standings else [],
        "test_auc": {name: of.get("test_auc") for name, of in result.get("by_variant", {}).items()},
    }  # fmt: skip
    _write_sweep(folder, page, facts)
    return facts


def sweep_lines(sweep: Mapping[str, Any]) -> dict[str, str]:
    state = ("failed" if sweep["failed"] else "ended") if sweep["ended"] else UNKNOWN
    state = f"stopped by {sweep['stopped_by']}" if sweep.get("stopped_by") else state
    lines = {
        "sweep": f"{len(sweep['variants'])} variants on {sweep['flags'].get('data')}, {state}",
        "steps": f"{sweep['step']:,} in {clock(sweep['seconds'])}",
        **facts(sweep, "failed"),
    }
    if sweep["standing"] and not sweep["failed"]:
        lines["winner" if sweep["winner"] else "leader"] = best_line(
            sweep["standing"][0], sweep["best"], sweep["flags"].get("save"), sweep["saved_step"]
        )
    if sweep["cost"] is not None:
        lines["trained"] = f"{sweep['cost']:.0%} of the steps of training all to the end"
    kinds = [left["kind"] for left in sweep["left"]]
    if kinds:
        says = {"dropped": "dropped at a rung", "diverged": "diverged"}
        lines["left"] = ", ".join(f"{kinds.count(kind)} {what}" for kind, what in says.items() if kind in kinds)
    if sweep["seed_noise"] is not None:
        means = sorted({at["mean"] for at in sweep["standing"] if at["left"] is None and at["mean"] is not None})
        within = len(means) > 1 and means[1] - means[0] < sweep["seed_noise"]
        lines["noise"] = f"{sweep['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
        lines["noise"] += "; rank 1 leads by less than that" * within
    return lines


def race_line(sweep: Mapping[str, Any]) -> dict[str, str]:
    if not sweep["standing"]:
        return {}
    places = standing(sweep["standing"], sweep["test_auc"])
    table = columns(places, left=(1, len(places[0]) - 1))
    left = any(at["left"] is not None for at in sweep["standing"])
    judged = any(at.get("held_out") is not None for at in sweep["standing"])
    notes = {MEANS: sweep["seed_noise"] is not None, JUDGED: judged, LEFT: left}
    return {"race": "\n".join([table, *(note for note, shown in notes.items() if shown)])}


def _write_sweep(folder: Path, page: Path, sweep: Mapping[str, Any]) -> None:
    lines, places = sweep_lines(sweep), sweep["standing"]
    best = lines.pop("winner", None) or lines.pop("leader", None)
    first = f"The best of {len(sweep['variants'])} variants is {best}." if best else None
    head, *cells = standing(places, sweep["test_auc"]) if places else [()]
    every = {at["variant"]: _by_kind(lines_of(folder / at["variant"])) for at in places}
    losses = {of: _points(lines, "loss") for of, (lines, _) in every.items()}
    held_out = {of: _points(evaluations, "test_logloss") for of, (_, evaluations) in every.items()}
    write_page(
        page,
        title=f"Sweep {folder.name}",
        lead=[
            first or sweep["failed"] or "No step is done yet.",
            *([f"Here, {MEANS}."] if sweep["seed_noise"] is not None else []),
            "A loss is a mean over the recent batches, each before anybody trained on its samples. A difference is to rank "
            f"1, on the same batches, with its standard error; {LEFT}.",
        ],
        tables=[Table(head, cells, "Variants"), Table(("", ""), [*lines.items()], "Sweep")],
        charts=[
            Chart("log loss, each interval", losses),
            Chart("log loss on the samples held out", held_out),
        ],
    )
