"""`skirl report`: the folder of a run or a sweep as text and as a page, also if it still goes on or was killed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from skirl.checkpoint.folder import BEST
from skirl.cli.show import SCORES, ShowFlags, columns, facts, scores, write_page
from skirl.tools.flags import flags_of, option
from skirl.tools.units import clock, figure, size
from skirl.train.resume import shown, told
from skirl.train.run_folder import CONFIG, RESULT, WORDS, lines_of

Line = Mapping[str, Any]
SWEEP, RACE, PAGE = "sweep.json", "race.jsonl", "report.html"
MEANS = "ranks are by the mean over the seeds of each configuration, then by each seed"
"""The note under a table in which seeds are pooled: a rank may have a higher loss than the next one."""
LEFT = "of a variant that left, all is as it was then"
JUDGED = "ranks are by held-out loss; loss is of training, each batch before it was trained on"
UNKNOWN = "still going on, killed, or failed"


@dataclass(frozen=True)
class Report(ShowFlags):
    positional: ClassVar[tuple[str, ...]] = ("folder",)

    folder: Path
    """The folder of the run or the sweep."""

    def run(self) -> dict[str, Any]:
        report = report_of_sweep if (self.folder / SWEEP).is_file() else report_of_run
        return report(self.folder)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        lines = run_lines(result) if result["command"] == "report" else sweep_lines(result)
        return lines | {"page": result["page"]}


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}), and a report needs it: name another run") from error


@contextmanager
def _of_files(folder: Path) -> Iterator[None]:
    """Turn an error about what files of the folder hold into a sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{folder} has a damaged file, or one of another version of skirl ({wrong}): name another run"
        ) from error


def _of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if line[name] is not None and math.isfinite(line[name])]


def _figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else figure(value, digits)


def _kept(folder: Any) -> str:
    return f"kept in {folder}" if folder else "which is not kept: --keep-best keeps the best in --save"


# A run


def report_of_run(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: name the folder of a run, such as runs/dlrm-synthetic-...")
    lines, config, result = lines_of(folder), _read(folder / CONFIG), _read(folder / RESULT)
    with _of_files(folder):
        train, evaluations = _of_kind(lines, "train"), _of_kind(lines, "eval")
        run = facts_of_result(result) if result else facts_so_far(config, train, evaluations)
        run |= {"changes": config.get("changes"), "command": "report", "failed": None, "run": str(folder)}
        losses = {"training, each interval": _points(train, "loss"), "held out": _points(evaluations, "test_logloss")}
        aucs = {"training, so far": _points(train, "auc"), "held out": _points(evaluations, "test_auc")}
        speed = {"samples": _points(train, "samples_per_second")}
        charts = {"Log loss": losses, "AUC": aucs, "Samples a second": speed}
        shown = run_lines(run) | _details(config, run, evaluations)
        run["page"] = write_page(folder / PAGE, f"Run {folder.name}", _lead(run), charts, shown)
    return run


def facts_so_far(config: Mapping[str, Any], lines: Sequence[Line], evaluations: Sequence[Line]) -> dict[str, Any]:
    """Return what a run did that has not ended, as `facts_of_result` does for one that has."""

    def total(name: str) -> float:
        return sum(line[name] for line in lines)

    def by_stage(name: str) -> dict[str, float]:
        stages = dict.fromkeys(stage for line in lines for stage in line[name])
        return {stage: sum(line[name].get(stage, 0.0) for line in lines) for stage in stages}

    last: Line = lines[-1] if lines else {}
    seconds, stall, busy = total("seconds"), total("stall"), by_stage("busy")
    samples = sum(line["samples_per_second"] * line["seconds"] for line in lines)
    return {
        **dict.fromkeys(("stopped_by", "run_failed", "missing", "kept", "loss", "by_trainer")),
        **{name: last.get(name) for name in ("auc", "ne", "touched", "fetched", "new", "written", "forwarded")},
        "flags": config["flags"], "trainers": config.get("trainers") or 1, "ended": False,
        "steps": last.get("step", 0), "samples": last.get("samples", 0), "interval_loss": last.get("loss"),
        "seconds": seconds, "samples_per_second": samples / max(seconds, 1e-9),
        "last": evaluations[-1] if evaluations else None,
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
    if run.get("stopped_early"):
        state = f"stopped early: {flags['patience']} evaluations brought no better log loss"
    took, begun = f"in {clock(run['seconds'])}", run.get("begun_at")
    took = f"; the last {run['steps'] - begun:,} steps {took}" if begun else f" {took}"
    lines = held_out_lines(run["last"], run["kept"], flags.get("save")) | {
        "run": f"{flags.get('model')} on {flags.get('data')}, {'failed' if run['run_failed'] else state}",
        "steps": f"{run['steps']:,}, {run['samples']:,} samples{took}",
        "speed": f"{run['samples_per_second']:,.0f} samples/s after the first step, without evaluations and checkpoints",
        **facts({"failed": run["run_failed"], "changed": "\n".join(told(run["changes"] or []))}),
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
    lines = {
        "test": f"{scores(last, 'test_')} on {last['test_samples']:,} samples held out, at step {last['test_step']:,}"
    }
    there = None if save is None else Path(save) / BEST
    best = kept or {
        "step": last["best_step"], "test_logloss": last["best_logloss"],
        "folder": there if there and there.is_dir() else None,
    }  # fmt: skip
    if kept is not None or best["step"] < last["test_step"]:
        lines["best"] = f"step {best['step']:,}, log loss {_figure(best['test_logloss'])}, {_kept(best['folder'])}"
    return lines


def _lead(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield what came of the run, and whether it overfits."""
    lines, last = run_lines(run), run["last"]
    yield f"{lines['run']}: {lines.get('test') or lines.get('loss') or lines['metrics']}."
    if last is not None and last["best_step"] != last["test_step"]:
        grown = f"from {_figure(last['best_logloss'])} to {last['test_logloss']:.4f} by step {last['test_step']:,}"
        yield f"It overfits: after step {last['best_step']:,}, held-out log loss rose {grown}."


def _details(config: Mapping[str, Any], run: Mapping[str, Any], evaluations: Sequence[Line]) -> dict[str, str]:
    """Return what the page shows beside the lines of the summary."""
    from skirl.cli.train import Train

    times = [("seconds", "", "of them while the loop waited")]
    times += [(name, f"{s:,.2f}", f"{run['blame'].get(name, 0.0):,.2f}") for name, s in run["busy"].items() if s]
    tests = [("step", *SCORES.values())]
    tests += [(f"{e['step']:,}", *(_figure(e[f"test_{name}"]) for name in SCORES)) for e in evaluations]
    usual = {n: json.loads(json.dumps(flag.default, default=str)) for n, flag in flags_of(Train).items()}
    changed = {n: shown(v) for n, v in config["flags"].items() if n not in usual or v != usual[n]}
    return {
        "stages of trainer 0" if run["trainers"] > 1 else "stages": columns(times),
        **({"evaluations": columns(tests, left=())} if evaluations else {}),
        "begun": f"{config['started']}, at step {config['begun_at']}",
        **{f"version of {name}": version for name, version in config["versions"].items()},
        "set": "\n".join(f"{option(name)} {value}" for name, value in changed.items()),
    }


# A sweep


def standing(places: Sequence[Mapping[str, Any]], aucs: Mapping[str, float | None]) -> str:
    """Return a table with a line for each place, with held-out losses only if ranks are by them, and AUCs if known."""
    from skirl.sweep.race import VariantPlace, difference

    heads = {"held_out": "lowest held out", "loss": "loss", "mean": "mean of seeds"}
    by = [name for name in heads if name == "loss" or any(at.get(name) is not None for at in places)]
    lines: list[tuple[str, ...]] = [
        ("rank", "variant", *(heads[name] for name in by), "loss to rank 1", "AUC", "state")
    ]
    for at in places:
        losses = (_figure(at.get(name), 5) for name in by)
        auc = _figure(aucs.get(at["variant"]))
        lines.append((str(at["rank"]), at["variant"], *losses, difference(VariantPlace(**at)), auc, at["state"]))
    return columns(lines, left=(1, len(lines[0]) - 1))


def best_line(sweep: Mapping[str, Any]) -> str:
    place = sweep["standing"][0]
    if place.get("held_out") is None:
        loss = "no loss yet" if place["loss"] is None else f"loss {figure(place['loss'], 5)}"
        return f"{place['variant']}, {loss} on samples that nobody had trained on"
    return f"{place['variant']}, log loss {figure(place['held_out'], 5)} on the samples held out"


def report_of_sweep(folder: Path) -> dict[str, Any]:
    config, result = _read(folder / SWEEP), _read(folder / RESULT)
    with _of_files(folder):
        sweep = facts_of_sweep(result) if result else sweep_so_far(folder, config)
        sweep |= {"command": "report of a sweep", "sweep": str(folder)}
        every = {at["variant"]: lines_of(folder / at["variant"]) for at in sweep["standing"]}
        losses = {of: _points(_of_kind(lines, "train"), "loss") for of, lines in every.items()}
        held_out = {of: _points(_of_kind(lines, "eval"), "test_logloss") for of, lines in every.items()}
        charts = {"Log loss, each interval": losses, "Log loss on the samples held out": held_out}
        best = sweep["standing"] and f"The best of {len(sweep['variants'])} variants is {best_line(sweep)}."
        lead = (
            sweep["failed"] or best or "No step is done yet.",
            "A loss is a mean over the recent batches, each before anybody trained on its samples. A difference is to rank "
            f"1, on the same batches, with its standard error; {LEFT}.",
        )
        sweep["page"] = write_page(folder / PAGE, f"Sweep {folder.name}", lead, charts, sweep_lines(sweep))
    return sweep


def sweep_so_far(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sweep did that has not ended, as `facts_of_sweep` does for one that has."""
    data = (folder / RACE).read_bytes() if (folder / RACE).is_file() else b""
    standings = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]  # the last may be half a line
    ends = [one for one, after in zip(standings, [*standings[1:], {}]) if one["begun_at"] != after.get("begun_at")]
    last = standings[-1] if standings else {"step": 0, "places": []}
    return {
        **dict.fromkeys(("winner", "failed", "stopped_by", "cost", "seed_noise")),
        "flags": config["flags"], "variants": [variant["name"] for variant in config["variants"]], "ended": False,
        "step": last["step"], "standing": last["places"], "aucs": {},
        "seconds": sum(one["seconds"] for one in ends),
    }  # fmt: skip


def facts_of_sweep(result: Mapping[str, Any]) -> dict[str, Any]:
    by_variant = result["by_variant"]
    auc = "test_auc" if any("test_auc" in of for of in by_variant.values()) else "auc"
    aucs = {name: of.get(auc) for name, of in by_variant.items()}
    return {**result, "flags": result, "variants": [*aucs], "ended": True, "step": result["steps"], "aucs": aucs}


def sweep_lines(sweep: Mapping[str, Any]) -> dict[str, str]:
    state = ("failed" if sweep["failed"] else "ended") if sweep["ended"] else UNKNOWN
    state = f"stopped by {sweep['stopped_by']}" if sweep["stopped_by"] else state
    lines = {
        "sweep": f"{len(sweep['variants'])} variants on {sweep['flags'].get('data')}, {state}",
        "steps": f"{sweep['step']:,} in {clock(sweep['seconds'])}",
        **facts(sweep, "failed"),
    }
    places = sweep["standing"]
    if places and not sweep["failed"]:
        lines["winner" if sweep["winner"] else "leader"] = best_line(sweep)
    if sweep["cost"] is not None:
        lines["trained"] = f"{sweep['cost']:.0%} of the steps of training all to the end"
    if (after := sweep.get("rungs_after")) and not (sweep["failed"] or sweep["stopped_by"]):
        lines["rungs"] = f"none was dropped at step {', '.join(map(str, after))}, which the data does not reach"
    left = [at["state"].split()[0] for at in places if at["left"] is not None]
    if left:
        says = {"dropped": "dropped at a rung", "diverged": "diverged"}
        lines["left"] = ", ".join(f"{left.count(kind)} {what}" for kind, what in says.items() if kind in left)
    if sweep["seed_noise"] is not None:
        means = sorted({at["mean"] for at in places if at["left"] is None and at["mean"] is not None})
        within = len(means) > 1 and means[1] - means[0] < sweep["seed_noise"]
        lines["noise"] = f"{sweep['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
        lines["noise"] += "; rank 1 leads by less than that" * within
    if places:
        judged = any(at.get("held_out") is not None for at in places)
        notes = {MEANS: sweep["seed_noise"] is not None, JUDGED: judged, LEFT: bool(left)}
        table = standing(places, sweep["aucs"])
        lines["race"] = "\n".join([table, *(note for note, applies in notes.items() if applies)])
    return lines
