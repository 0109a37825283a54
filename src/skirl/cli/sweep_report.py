"""The report of a sweep: its standing as a table, and the page of its folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.cli import show
from skirl.cli.page import Chart, Table, write_page
from skirl.sweep.checkpoint import SWEEP
from skirl.sweep.folder import RACE, RESULT
from skirl.sweep.race import VariantPlace
from skirl.sweep.standing import difference
from skirl.tools.sealed_json import finite
from skirl.tools.units import clock, figure
from skirl.train.run_folder import lines_of

MEANS = "ranks are by the mean over the seeds of each configuration, then by each seed"
"""The note under a table in which seeds are pooled: a rank may have a higher loss than the next one."""
SAME = "; but all seeds began with the same rows and weights, out of --from, so other ones may differ by more"
"""What to know of the noise of seeds then."""


def standing(places: Sequence[Mapping[str, Any]], judged: bool = False) -> list[tuple[str, ...]]:
    """Return the head of the table and a line for each place, cell by cell; held-out losses only if ranks are by them.

    >>> place = {"rank": 2, "variant": "lr=0.1", "loss": 0.5, "difference": 0.0123, "error": 4e-4, "state": "races"}
    >>> standing([place | {"auc": 0.75}])[1]
    ('2', 'lr=0.1', '0.50000', '+0.01230 ± 0.00040', '0.7500', 'races')
    """
    judged = judged or any(at.get("held_out") is not None for at in places)
    lines: list[tuple[str, ...]] = [
        ("rank", "variant", *(["held out"] if judged else []), "loss", "to rank 1", "AUC", "state")
    ]
    for at in places:
        scores = [*([at.get("held_out")] if judged else []), at["loss"]]
        losses = ("-" if score is None else figure(score, 5) for score in scores)
        auc = "-" if at["auc"] is None else f"{at['auc']:.4f}"
        lines.append((str(at["rank"]), at["variant"], *losses, difference(place_of(at)), auc, at["state"]))
    return lines


def place_of(at: Mapping[str, Any]) -> VariantPlace:
    return VariantPlace(**{name: value for name, value in at.items() if name != "auc"})


def table_text(places: Sequence[Mapping[str, Any]]) -> str:
    lines = standing(places)
    return show.columns(lines, left=(1, len(lines[0]) - 1))


def best_line(place: Mapping[str, Any], best: Mapping[str, Any] | None = None) -> str:
    """Return rank 1 with what it is ranked by, as text.

    >>> best_line({"variant": "a", "loss": 0.5, "held_out": None})
    'a, loss 0.50000 on samples that nobody had trained on'
    >>> best_line({"variant": "a", "held_out": 0.6}, {"step": 40, "folder": "saves/a/best"})
    'a, log loss 0.60000 on the samples held out, at step 40, in saves/a/best'
    """
    if place.get("held_out") is None:
        loss = "no loss yet" if place["loss"] is None else f"loss {figure(place['loss'], 5)}"
        return f"{place['variant']}, {loss} on samples that nobody had trained on"
    at = "" if best is None else f", at step {best['step']:,}" + (f", in {best['folder']}" if best["folder"] else "")
    return f"{place['variant']}, log loss {figure(place['held_out'], 5)} on the samples held out{at}"


def report(folder: Path, page: Path | None) -> dict[str, Any]:
    """Read the folder of a sweep, write its page and return the facts."""
    at = folder / SWEEP
    try:
        sweep = json.loads(at.read_bytes())
        result = json.loads(at.read_bytes()) if (at := folder / RESULT).is_file() else {}
        data = at.read_bytes() if (at := folder / RACE).is_file() else b""
        race = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]  # the last may be half a line
        left, standings = ([line for line in race if line["event"] == event] for event in ("left", "standing"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{at} is damaged ({error!r}), and a report needs it: name another sweep") from None
    ends = [one for one, after in zip(standings, [*standings[1:], {}]) if one["begun_at"] != after.get("begun_at")]
    page = page or folder / "report.html"
    facts = {
        "command": "report of a sweep",
        "sweep": str(folder),
        "page": str(page),
        "flags": sweep["flags"],
        "started": sweep["started"],
        "ended": bool(result),
        **{name: result.get(name) for name in ("winner", "failed", "best", "cost", "from", "seed_noise")},
        "measure": standings[-1]["measure"] if standings else None,
        "variants": [variant["name"] for variant in sweep["variants"]],
        "left": left,
        "step": standings[-1]["step"] if standings else 0,
        "seconds": sum(one["seconds"] for one in ends),
        "standing": standings[-1]["places"] if standings else [],
        "test_auc": {name: of.get("test_auc") for name, of in result.get("by_variant", {}).items()},
    }
    _write_page(folder, page, facts)
    return facts


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts as lines of text, by title."""
    flags, k = facts["flags"], len(facts["variants"])
    state = ("failed" if facts["failed"] else "ended") if facts["ended"] else "still going on, killed, or failed"
    lines = {
        "sweep": f"{k} variants on {flags.get('data')}, {state}",
        "steps": f"{facts['step']:,} in {clock(facts['seconds'])}",
        **show.facts(facts, "failed"),
    }
    if facts["standing"] and not facts["failed"]:
        lines["winner" if facts["winner"] else "leader"] = best_line(facts["standing"][0], facts["best"])
    if facts["cost"] is not None:
        lines["trained"] = f"{facts['cost']:.0%} of the steps of training all to the end"
    kinds = [left["kind"] for left in facts["left"]]
    if kinds:
        says = {"dropped": "dropped at a rung", "diverged": "diverged", "patience": "no better in their evaluations"}
        lines["left"] = ", ".join(f"{kinds.count(kind)} {what}" for kind, what in says.items() if kind in kinds)
    return lines | noise(facts)


def noise(facts: Mapping[str, Any]) -> dict[str, str]:
    if facts["seed_noise"] is None:
        return {}
    said = f"{facts['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
    return {"noise": said + SAME * bool(facts["from"])}


def _write_page(folder: Path, page: Path, facts: Mapping[str, Any]) -> None:
    text, places, scores = as_text(facts), facts["standing"], facts["test_auc"]
    best = text.pop("winner", None) or text.pop("leader", None)
    first = (
        f"The best of {len(facts['variants'])} variants is {best}."
        if best
        else facts["failed"] or "No step is done yet."
    )
    head, *cells = standing(places) if places else [()]
    if any(score is not None for score in scores.values()):
        head = (*head, "held-out AUC")
        found = [scores.get(at["variant"]) for at in places]
        cells = [(*line, "-" if score is None else f"{score:.4f}") for line, score in zip(cells, found, strict=True)]
    order = [at["variant"] for at in places]
    losses = {name: _lines(folder / name, "train", "loss") for name in order}
    held_out = {name: _lines(folder / name, "eval", "test_logloss") for name in order}
    write_page(
        page,
        title=f"Sweep {folder.name}",
        lead=[
            first,
            *([f"Here, {MEANS}."] if facts["seed_noise"] is not None else []),
            "A loss is a mean over the recent batches, each before anybody trained on its samples; of one that left, as it "
            "was then. A difference is to rank 1, on the same batches, with the standard error of the paired difference.",
        ],
        tables=[Table(head, cells, "Variants"), Table(("", ""), list(text.items()), "Sweep")],
        charts=[
            Chart("log loss, each interval", losses, "step", "log loss"),
            Chart("log loss on the samples held out", held_out, "step", "log loss"),
        ],
    )


def _lines(folder: Path, kind: str, name: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in lines_of(folder)
        if line["kind"] == kind and finite(line.get(name))
    ]
