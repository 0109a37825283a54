"""The page of a whole sweep: the winner, losses, when variants left, and differences with their errors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skirl.sweep.names import RACE, RESULT, SWEEP
from skirl.sweep.race import VariantPlace
from skirl.sweep.table import best_line, rows
from skirl.tools.os_errors import writing
from skirl.tools.progress import clock
from skirl.tools.sealed_json import AMOUNT, ANY, COUNT, SCORE, TEXT, finite, misfit
from skirl.train.report.page import Page
from skirl.train.report.plot import COLORS, Chart
from skirl.train.report.run_folder import lines_of

DRAWN = 6
"""How many variants have lines in the charts, the best ones: as many as there are colours. The tables list all."""
MOST_RATES = 60
"""Most stretches of the chart of the speed: shorter ones would show the noise of single steps."""
ERRORS = 2.0
"""Half the width of a difference's band, in standard errors."""
SAME = "; but all seeds began with the same rows and weights, out of --from, so other ones may differ by more"
"""What to know of the noise of seeds then."""
OF_SWEEP = {"flags": {...: ANY}, "variants": [{"name": TEXT, "overrides": {...: ANY}}], "started": TEXT}
OF_LEFT = {"event": TEXT, "step": COUNT, "variant": TEXT, "why": TEXT, "kind": TEXT}
OF_STANDING = {
    "event": TEXT, "step": COUNT, "seconds": AMOUNT,
    "places": [{"rank": COUNT, "variant": TEXT, "loss": SCORE, "difference": SCORE, "error": SCORE,
                "state": TEXT, "auc": SCORE}],
}  # fmt: skip


def report(folder: Path, page: Path | None) -> dict[str, Any]:
    """Read the folder of a sweep, write its page and return the facts.

    **Arguments**

    - `folder`: the folder of the sweep.
    - `page`: the file to write; report.html in the folder if None.
    """
    sweep = _whole(folder / SWEEP, OF_SWEEP)
    result = _whole(folder / RESULT, {"failed": ANY, "winner": ANY}) if (folder / RESULT).is_file() else None
    left, standings = _race(folder / RACE)
    page = page or folder / "report.html"
    facts = {
        "command": "report of a sweep",
        "sweep": str(folder),
        "page": str(page),
        "flags": sweep["flags"],
        "started": sweep["started"],
        "ended": result is not None,
        "winner": None if result is None else result["winner"],
        "measure": standings[-1].get("measure", "unseen") if standings else None,
        "failed": None if result is None else result["failed"],
        "best": None if result is None else result.get("best"),
        "cost": None if result is None else result.get("cost"),
        "from": None if result is None else result.get("from"),
        "seed_noise": None if result is None else result.get("seed_noise"),
        "variants": [variant["name"] for variant in sweep["variants"]],
        "left": left,
        "step": standings[-1]["step"] if standings else 0,
        "seconds": sum(standings[last]["seconds"] for _, last in _sittings(standings)),
        "standing": standings[-1]["places"] if standings else [],
    }
    losses = {name: _losses(folder / name) for name in facts["variants"]}
    held_out = {name: _losses(folder / name, "eval", "test_logloss") for name in facts["variants"]}
    with writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            drawn(folder.name, facts, standings, losses, held_out).html(), encoding="utf-8", errors="replace"
        )
    return facts


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts as lines of text, by title."""
    flags, k = facts["flags"], len(facts["variants"])
    state = ("failed" if facts["failed"] else "ended") if facts["ended"] else "still going on, killed, or failed"
    lines = {
        "sweep": f"{k} variants on {flags.get('data')}, {state}",
        "steps": f"{facts['step']:,} in {clock(facts['seconds'])}",
    }
    if facts["failed"]:
        lines["failed"] = facts["failed"]
    if facts["standing"] and not facts["failed"]:
        lines["winner" if facts["winner"] else "leader"] = best_line(_place(facts["standing"][0]), facts.get("best"))
    if facts["cost"] is not None:
        lines["trained"] = f"{facts['cost']:.0%} of the steps of training all to the end"
    kinds = [left["kind"] for left in facts["left"]]
    said = {
        "sure": "surely behind",
        "rung": "below a rung",
        "diverged": "diverged",
        "patience": "no better in their evaluations",
    }
    if kinds:
        lines["left"] = ", ".join(f"{kinds.count(kind)} {what}" for kind, what in said.items() if kind in kinds)
    if facts["seed_noise"] is not None:
        lines["noise"] = (
            f"{facts['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
            + SAME * bool(facts.get("from"))
        )
    return lines


def drawn(
    name: str,
    facts: Mapping[str, Any],
    standings: Sequence[Mapping[str, Any]],
    losses: Mapping[str, Sequence[tuple[float, float]]],
    held_out: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Page:
    """Draw the page of a sweep."""
    held_out = held_out or {}
    page = Page(f"Sweep {name}")
    if facts["winner"]:
        of = "log loss on the samples held out" if facts["measure"] == "held out" else "loss on unseen samples"
        mean = ", as a mean over the seeds of a configuration" if facts["seed_noise"] is not None else ""
        page.lead(f"{facts['winner']} is the best of {len(facts['variants'])} variants: the lowest {of}{mean}.")
    page.facts(as_text(facts))
    if not standings:
        page.note("Nothing to draw yet: a line comes every --log-every steps.")
        return page
    page.heading("Standing")
    head, *table = rows(
        [_place(at) for at in facts["standing"]], {at["variant"]: at["auc"] for at in facts["standing"]}
    )
    page.table(head, table)
    page.note(
        (
            "Ranks are by the log loss on the samples held out, the lowest of each variant's evaluations. "
            if facts["measure"] == "held out"
            else "Ranks are by the loss. "
        )
        + "Those that others beat come last, the last to leave first. Losses are means over the recent batches, the last "
        "half or more, each before anybody trained on its samples; of one that left, as they were then. A difference is to "
        "rank 1, on the recent batches of both, with its standard error: all variants saw the same batches, so it is that "
        "of the paired difference. Seeds of one configuration have one difference, and are ranked by their mean first."
    )
    gone = {left["variant"]: left["step"] for left in facts["left"]}
    order = [at["variant"] for at in facts["standing"]]
    page.heading("Losses and differences")
    colors = dict(zip(order, COLORS[:DRAWN], strict=False))
    page.keys({_with_end(name, gone): color for name, color in colors.items()})
    charts = [_losses_chart(colors, losses), _differences_chart(colors, order[0], standings, gone)]
    if any(len(line) > 1 for line in held_out.values()):
        lines = {name: held_out[name] for name in colors if held_out.get(name)}
        charts.append(_of_variants("log loss on the samples held out", lines, colors))
    page.charts(charts)
    if len(order) > DRAWN:
        page.note(f"Drawn are the best {DRAWN} of {len(order)} variants. A line ends where its variant left.")
    page.note("Where a band is much wider in the first tenth of its line, over few batches, it is cut off.")
    if (facts["flags"].get("epochs") or 1) > 1:
        page.note(
            "From the second epoch on, log losses of intervals are of samples that were trained on before. They rank "
            "nobody, and no difference is drawn."
        )
    rates = speed(standings)
    if rates:
        page.heading("Time")
        first, last = rates[0][0], rates[-1][0]
        evaluated = facts["flags"].get("eval_every")
        page.charts([_speed_chart(rates), _racing_chart(order, facts["left"], first, last)])
        page.note(
            "Each step trains all variants in the race on one batch, so steps take less time as variants leave. "
            "The time before the first line is left out, as it has the start in it; so is that before the first line "
            "after each resume."
            + (f" Every {evaluated:,} steps all are evaluated, which takes time, too." if evaluated else "")
        )
    page.heading("When they left")
    page.bars(
        {
            variant: (float(gone.get(variant, facts["step"])), _end(variant, facts["left"], facts["step"]))
            for variant in order
        },
        colors,
    )
    resumed = standings[-1].get("begun_at")
    page.note(
        (f"Resumed {facts['started']} after step {resumed:,}. " if resumed else f"Begun {facts['started']}. ")
        + "Each variant has a folder of its own here, which skirl report draws a page of."
    )
    return page


def speed(standings: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return points of the line of steps a second over the steps, two for each stretch between standings.

    Seconds begin anew where a sweep resumes, so no stretch reaches over a resume.

    **Arguments**

    - `standings`: lines of race.jsonl, in their order.

    >>> speed([{"step": 10, "seconds": 9.0}, {"step": 20, "seconds": 14.0}, {"step": 30, "seconds": 16.0}])
    [(10.0, 2.0), (20.0, 2.0), (20.0, 5.0), (30.0, 5.0)]
    """
    points: list[tuple[float, float]] = []
    for first, last in _sittings(standings):
        at = first
        for i in range(first + 1, last + 1):
            steps, seconds = (standings[i][what] - standings[at][what] for what in ("step", "seconds"))
            if seconds > 0 < steps and (steps * MOST_RATES >= standings[-1]["step"] or i == last):
                points += [(float(standings[k]["step"]), steps / seconds) for k in (at, i)]
                at = i
    return points


def _sittings(standings: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Return the first and last standing of each part of a sweep that was resumed.

    A resume shows in begun_at; lines from before that was written have only their seconds, which fall.
    """
    found: list[tuple[int, int]] = []
    for i, now in enumerate(standings):
        was = standings[i - 1] if i else now
        same = now.get("begun_at") == was.get("begun_at") and now["seconds"] >= was["seconds"]
        if i and same:
            found[-1] = (found[-1][0], i)
        else:
            found.append((i, i))
    return found


def _speed_chart(rates: Sequence[tuple[float, float]]) -> Chart:
    return Chart("steps a second", "step", {"steps": rates}, marks=(0.0,), log=(False, False), dots=False)


def _racing_chart(names: Sequence[str], left: Sequence[Mapping[str, Any]], first: float, last: float) -> Chart:
    """Draw how many variants are in the race from one step to another, as a staircase."""
    ends = sorted(float(one["step"]) for one in left)
    racing = len(names) - sum(end <= first for end in ends)
    line = [(first, float(racing))]
    for end in (end for end in ends if first < end <= last):
        line += [(end, float(racing)), (end, float(racing - 1))]
        racing -= 1
    line.append((last, float(racing)))
    return Chart("variants in the race", "step", {"variants": line}, marks=(0.0,), log=(False, False), dots=False)


def _losses_chart(colors: Mapping[str, str], losses: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    lines = {name: losses[name] for name in colors if losses.get(name)}
    return _of_variants("log loss, each interval", lines, colors)


def _differences_chart(
    colors: Mapping[str, str], leader: str, standings: Sequence[Mapping[str, Any]], gone: Mapping[str, int]
) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for name in (name for name in colors if name != leader):
        for standing in (one for one in standings if _by_losses(one)):
            at = next(at for at in standing["places"] if at["variant"] == name)
            if standing["step"] > gone.get(name, standing["step"]) or not (
                finite(at["difference"]) and finite(at["error"])
            ):
                continue
            step, half = float(standing["step"]), ERRORS * at["error"]
            lines.setdefault(name, []).append((step, at["difference"]))
            bands.setdefault(name, []).append((step, at["difference"] - half, at["difference"] + half))
    title = f"difference to rank 1 at that step, and {ERRORS:g} standard errors"
    later = [y for band in bands.values() for _, *ys in band[len(band) // 10 :] for y in ys]
    low, high = min(later, default=0.0), max(later, default=0.0)
    lines = {name: [(x, min(max(y, low), high)) for x, y in line] for name, line in lines.items()}
    bands = {
        name: [(x, min(max(down, low), high), min(max(up, low), high)) for x, down, up in band]
        for name, band in bands.items()
    }
    return replace(_of_variants(title, lines, colors), marks=(0.0,), bands=bands)


def _by_losses(standing: Mapping[str, Any]) -> bool:
    """Return whether ranks were by losses, which came to their last batch in this step."""
    return (
        standing.get("measure", "unseen") == "unseen" and standing.get("unseen", standing["step"]) == standing["step"]
    )


def _of_variants(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], colors: Mapping[str, str]) -> Chart:
    if not lines:
        return Chart(title, "step", {"none yet": [(0.0, 0.0)]}, log=(False, False), dots=False)
    return Chart(title, "step", lines, log=(False, False), dots=False, colors=colors)


def _with_end(name: str, gone: Mapping[str, int]) -> str:
    return f"{name}, left at {gone[name]:,}" if name in gone else name


def _end(variant: str, left: Sequence[Mapping[str, Any]], step: int) -> str:
    return next((one["why"] for one in left if one["variant"] == variant), f"trained for {step:,} steps")


def _place(at: Mapping[str, Any]) -> VariantPlace:
    return VariantPlace(**{name: value for name, value in at.items() if name != "auc"})


def _losses(folder: Path, kind: str = "train", name: str = "loss") -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in lines_of(folder)
        if line["kind"] == kind and finite(line.get(name))
    ]


def _race(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read who left and where all stood, ignoring a partial last line."""
    found: dict[str, list[dict[str, Any]]] = {"left": [], "standing": []}
    forms = {"left": OF_LEFT, "standing": OF_STANDING}
    data = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            read = json.loads(line)
            wrong = misfit(read, {"event": TEXT}) or misfit(read, forms.get(read["event"], {}))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not a line of a race ({error}): take it out") from None
        if wrong is not None:
            raise ValueError(f"{path}, line {number} is not a line of a race ({wrong}): take it out")
        found.setdefault(read["event"], []).append(read)
    return found["left"], found["standing"]


def _whole(path: Path, form: Any) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
        wrong = misfit(read, form)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}), and a report needs it: name another sweep") from None
    if wrong is not None:
        raise ValueError(f"{path} is damaged, or was written by another version of skirl ({wrong}): name another sweep")
    return read
