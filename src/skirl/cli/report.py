"""`skirl report`: the folder of a run or a sweep as text and as a page, also if it still goes on or was killed. The lines
of a result are those that `skirl train` and `skirl sweep` print."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skirl.cli.show import Chart, ShowFlags, columns, facts, scores, write_page
from skirl.tools.units import clock, figure, size
from skirl.train.resume import told
from skirl.train.run_folder import CONFIG, RESULT, STANDING, SWEEP, WORDS, lines_of

Line = Mapping[str, Any]
Page = tuple[Sequence[str], Mapping[str, Chart], dict[str, str]]
"""The sentences at the top of a page, its charts, and the lines that are printed too."""
PAGE = "report.html"
UNKNOWN = "still going on, killed, or failed"
NOTE = """a loss is a mean over the recent batches, each before it was trained on
one to rank 1 is on the same batches, with its standard error
of a variant that left, all is as it was then
seeds of one configuration are ranked by their mean, then by their own"""


@dataclass(frozen=True)
class Report(ShowFlags):
    folder: Path
    """The folder of the run or the sweep."""

    def run(self) -> dict[str, Any]:
        return report(self.folder)

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        return result["lines"] | {"page": result["page"]}


def report(folder: Path) -> dict[str, Any]:
    """Write the page of a folder. Return its path, the result in the folder, if there is one, and the lines about it."""
    kind, file, make = ("Sweep", SWEEP, _sweep) if (folder / SWEEP).is_file() else ("Run", CONFIG, _run)
    if not (folder / file).is_file():
        raise ValueError(f"{folder} has no {CONFIG}: name the folder (--run) of a run or a sweep")
    try:
        result = _read(folder / RESULT)
        lead, charts, lines = make(folder, _read(folder / file), result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(
            f"{folder} has a damaged file, or one of another version of skirl ({wrong}): name another run"
        ) from error
    page = write_page(folder / PAGE, f"{kind} {folder.name}", lead, charts, lines | _stages(result))
    return {"result": result, "lines": lines, "page": page}


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def _of_kind(lines: Sequence[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def _points(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    return [(line["step"], line[name]) for line in lines if line[name] is not None and math.isfinite(line[name])]


def _figure(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else figure(value, digits)


# A run


def _run(folder: Path, config: dict[str, Any], result: dict[str, Any]) -> Page:
    every = lines_of(folder)
    train, evaluations = _of_kind(every, "train"), _of_kind(every, "eval")
    last = result or {**config["flags"], **(evaluations[-1] if evaluations else {})}
    if result:
        lines = run_lines(result)
    else:
        lines = {**held_out_lines(last), "run": f"{last['model']} on {last['data']}, {UNKNOWN}"}
        lines |= facts(train[-1]) if train else {"loss": "none yet: a line comes every --log-every steps"}
    charts = {
        "Log loss": {
            "training, each interval": _points(train, "loss"),
            "held out": _points(evaluations, "test_logloss"),
        },
        "AUC": {"training, so far": _points(train, "auc"), "held out": _points(evaluations, "test_auc")},
        "Samples a second": {"samples": _points(train, "samples_per_second")},
    }
    return [f"{lines['run']}: {lines.get('test') or 'loss ' + lines['loss']}."], charts, lines


def run_lines(run: Mapping[str, Any]) -> dict[str, str]:
    steps, rows, counters, moved, kept = (run[of] for of in ("steps", "rows", "counters", "movement", "checkpoints"))
    state = "ended"
    if run.get("stopped_early"):
        state = f"stopped early: {run['patience']} evaluations brought no better log loss"
    state = "failed" if run["failed"] else f"stopped by {kept['stopped_by']}" if kept["stopped_by"] else state
    took, begun = f"in {clock(run['seconds'])}", run["begun_at"]
    took = f"; the last {steps - begun:,} steps {took}" if begun else f" {took}"
    first, last, mean = (figure(run["loss"][name]) for name in ("first", "last", "mean"))
    before = "its batch was trained on" if run.get("epochs", 1) == 1 else "this pass trained on its batch"
    each = {name: f"{counters[name] / max(1, steps):,.0f} {word}" for name, word in WORDS.items()}
    lines = held_out_lines(run) | {
        "run": f"{run['model']} on {run['data']}, {state}",
        "steps": f"{steps:,}, {run['samples']:,} samples{took}",
        "speed": f"{run['samples_per_second']:,.0f} samples/s after the first step, without evaluations and checkpoints",
        **facts({"failed": run["failed"], "changed": "\n".join(told(run.get("changes") or []))}),
        **facts({"missing": "\n".join(run["missing"])}),
        "loss": f"{first} for the first batch, {last} for the last, {mean} on average",
        "metrics": f"{scores(run)} of all predictions, each made before {before}",
        "rows": f"{rows['touched']:,} touched; {', '.join(each.values())} a step",
    }
    if counters["fetched"] + counters["written"]:
        lines["hidden"] = f"{moved['hidden']:.0%} of the movement, behind compute"
    lines["waited"] = f"{moved['stall']:.2f} s for rows, {moved['read']:.2f} s for the loader"
    for n, lane in enumerate((run.get("by_trainer") or {}).get("lanes", ())):
        counts = ", ".join(f"{lane[name]:,} {word}" for name, word in {"touched": "touched", **WORDS}.items())
        lines[f"trainer {n}"] = (
            f"{counts}; {size(lane['sent'])} sent; in {clock(lane['seconds'])} it waited {lane['waited']:.2f} s for others, "
            f"{lane['stall']:.2f} s for rows, {lane['read']:.2f} s for the loader; {size(lane['peak_bytes'])} at its peak"
        )
    return lines if "left" in run else lines | _lines_of_one(run)


def _lines_of_one(run: Mapping[str, Any]) -> dict[str, str]:
    """Return what the result of a run says that variants of a sweep share."""
    rows, kept, begun = run["rows"], run["checkpoints"], run["from"]
    staging = f"{size(run['staging_bytes'])} more for rows on their way"
    lines = {
        "tables": f"{rows['tables']:,} rows of {run['dim']}, {size(rows['bytes_of_all'])} with their state",
        "cache": f"{rows['cache']:,} rows, {size(run['cache_bytes'])}, {rows['in_cache']:,} filled; {staging}",
        "memory": f"{size(run['peak_bytes'])} at its peak, the whole process",
    }
    if run["run"]:
        lines["folder"] = f"{run['run']}; tensorboard --logdir {Path(run['run']).parent}"
    if run["save"]:
        lines["saved"] = "nothing" if kept["newest"] is None else f"step {kept['newest']:,} in {run['save']}"
        if kept["failed"]:
            lines["saved"] += f"\n{kept['failed']} more could not be written: {kept['last_failure']}"
        written = f"{kept['count']:,} written, {size(kept['bytes'])} of changes"
        lines["checkpoints"] = f"{written}; training stood still for {kept['pause_share']:.1%} of the time"
    if run["bad_rows_skipped"]:
        lines["skipped"] = f"{run['bad_rows_skipped']:,} malformed rows"
    if begun is not None:
        state = "with their optimizer's state" if begun["row_state"] else "whose optimizer's state starts from zero"
        lines["begun"] = f"with {begun['rows']:,} rows out of {begun['folder']}, {state}"
    return lines | facts(run, "trace")


def held_out_lines(last: Line) -> dict[str, str]:
    """Return what the last evaluation found, and the best one. `last` also has the flags of its run."""
    if "test_step" not in last:
        return {}
    kept = last.get("best")
    best, loss = (kept["step"], kept["test_logloss"]) if kept else (last["best_step"], last["best_logloss"])
    test = f"{scores(last, 'test_')} on {last['test_samples']:,} samples held out, at step {last['test_step']:,}"
    if not kept and best == last["test_step"]:
        return {"test": test}
    where = f", kept in {kept['folder']}" if kept else ", which is not kept: --keep-best keeps the best in --save"
    return {
        "test": test,
        "best": f"step {best:,}, log loss {_figure(loss)}" + where * bool(kept or not last.get("keep_best")),
    }


def _stages(result: Line) -> dict[str, str]:
    if "movement" not in result:
        return {}
    moved, times = result["movement"], [("seconds", "", "of them while the loop waited")]
    times += [(name, f"{s:,.2f}", f"{moved['blame'].get(name, 0.0):,.2f}") for name, s in moved["busy"].items() if s]
    return {"stages of trainer 0" if result.get("by_trainer") else "stages": columns(times)}


# A sweep


def _sweep(folder: Path, config: dict[str, Any], result: dict[str, Any]) -> Page:
    last = _read(folder / STANDING) or {"step": 0, "places": []}
    places, names = result["standing"] if result else last["places"], [of["name"] for of in config["variants"]]
    if result:
        lines = sweep_lines(result)
    else:
        lines = {
            "sweep": f"{len(names)} variant{'s' * (len(names) > 1)} on {config['flags']['data']}, {UNKNOWN}",
            "steps": f"{last['step']:,}",
        }
        lines |= {"leader": best_line(places), "race": standing(places, {})} if places else {}
    every = {at["variant"]: lines_of(folder / at["variant"]) for at in places}
    charts = {
        "Log loss, each interval": {of: _points(_of_kind(told, "train"), "loss") for of, told in every.items()},
        "Log loss on the samples held out": {
            of: _points(_of_kind(told, "eval"), "test_logloss") for of, told in every.items()
        },
    }
    best = f"The best variant is {best_line(places)}." if places else "No step is done yet."
    return [result.get("failed") or best], charts, lines


def standing(places: Sequence[Line], aucs: Mapping[str, float | None]) -> str:
    """Return a table with a line for each place, with held-out losses only if ranks are by them, and AUCs if known."""
    from skirl.sweep.race import VariantPlace, difference

    heads = {"held_out": "lowest held out", "loss": "loss"}
    by = [name for name in heads if name == "loss" or any(at.get(name) is not None for at in places)]
    lines: list[tuple[str, ...]] = [
        ("rank", "variant", *(heads[name] for name in by), "loss to rank 1", "AUC", "state")
    ]
    for at in places:
        losses = (_figure(at.get(name), 5) for name in by)
        auc = _figure(aucs.get(at["variant"]))
        lines.append((str(at["rank"]), at["variant"], *losses, difference(VariantPlace(**at)), auc, at["state"]))
    return "\n".join([columns(lines, left=(1, len(lines[0]) - 1)), NOTE])


def best_line(places: Sequence[Line]) -> str:
    first = places[0]
    if first.get("held_out") is None:
        loss = "no loss yet" if first["loss"] is None else f"loss {figure(first['loss'], 5)}"
        return f"{first['variant']}, {loss} on samples that nobody had trained on"
    return f"{first['variant']}, log loss {figure(first['held_out'], 5)} on the samples held out"


def sweep_lines(sweep: Mapping[str, Any]) -> dict[str, str]:
    places, by_variant = sweep["standing"], sweep["by_variant"]
    state = "failed" if sweep["failed"] else "ended"
    state = f"stopped by {sweep['stopped_by']}" if sweep["stopped_by"] else state
    lines = {
        "sweep": f"{len(by_variant)} variant{'s' * (len(by_variant) > 1)} on {sweep['data']}, {state}",
        "steps": f"{sweep['steps']:,} in {clock(sweep['seconds'])}",
        **facts(sweep, "failed"),
    }
    if not sweep["failed"]:
        lines["winner" if sweep["winner"] else "leader"] = best_line(places)
    lines["trained"] = f"{sweep['cost']:.0%} of the steps of training all to the end"
    if sweep["seed_noise"] is not None:
        lines["noise"] = f"{sweep['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
    auc = "test_auc" if any("test_auc" in of for of in by_variant.values()) else "auc"
    lines["race"] = standing(places, {name: of.get(auc) for name, of in by_variant.items()})
    lines |= facts(sweep, "samples_per_second", "processes_used", "peak_bytes", "form")
    if not sweep["exact"]:
        lines["exact"] = "no: variants were computed as one, and their last bits may not be those of lone runs"
    if sweep["saved_step"] is not None and not sweep["failed"]:
        lines["saved"] = f"step {sweep['saved_step']:,} in {sweep['save']}"
    return lines | facts(sweep, "run") | facts({"missing": "\n".join(sweep["missing"])})
