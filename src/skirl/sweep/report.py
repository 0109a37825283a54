"""What a sweep shows: the standing while it goes on, and the report and page of its folder."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skirl.sweep.checkpoint import SWEEP
from skirl.sweep.folder import RACE, RESULT
from skirl.sweep.race import VariantPlace
from skirl.tools.page import Chart, Table, write_page
from skirl.tools.progress import Facts, clock, figure
from skirl.tools.sealed_json import finite
from skirl.tools.speed import Speed
from skirl.train.report.run_folder import lines_of

HEAD = ("rank", "variant", "held out", "loss", "to rank 1", "AUC", "state")
"""The columns; held out only while ranks are by that."""
MEANS = "ranks are by the mean over the seeds of each configuration, then by each seed"
"""The note under a table in which seeds are pooled: a rank may have a higher loss than the next one."""
AUCS_EVERY = 2.0
"""Seconds between two computations of the AUCs, which take a millisecond per variant."""
SAME = "; but all seeds began with the same rows and weights, out of --from, so other ones may differ by more"
"""What to know of the noise of seeds then."""


def rows(places: Sequence[VariantPlace], aucs: Mapping[str, float | None]) -> list[tuple[str, ...]]:
    """Return the head of the table and a line for each place, cell by cell.

    >>> rows([VariantPlace(2, "lr=0.1", 0.5, 0.0123, 0.0004, "races")], {"lr=0.1": 0.75})[1]
    ('2', 'lr=0.1', '0.50000', '+0.01230 ± 0.00040', '0.7500', 'races')
    >>> rows([VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads", held_out=0.6)], {})[0][:4]
    ('rank', 'variant', 'held out', 'loss')
    """
    judged = any(place.held_out is not None for place in places)
    lines = [HEAD, *(_cells(place, aucs.get(place.variant)) for place in places)]
    return [
        tuple(cell for cell, name in zip(line, HEAD, strict=True) if judged or name != "held out") for line in lines
    ]


def _cells(place: VariantPlace, auc: float | None) -> tuple[str, ...]:
    return (
        str(place.rank),
        place.variant,
        "-" if place.held_out is None else figure(place.held_out, 5),
        "-" if place.loss is None else figure(place.loss, 5),
        difference(place),
        "-" if auc is None else f"{auc:.4f}",
        place.state,
    )


def difference(place: VariantPlace) -> str:
    """Return how much higher its loss is than that of rank 1, with the standard error, as text.

    >>> difference(VariantPlace(1, "lr=0.1", 0.5, 0.0, 0.0, "leads", leading=True))
    ''
    >>> difference(VariantPlace(2, "lr=0.1,seed=1", 0.5, 0.0, 0.0, "races", leading=True))
    'seed of rank 1'
    """
    if place.rank == 1 or place.difference is None:
        return ""
    if place.leading:
        return "seed of rank 1"
    return f"{place.difference:+.5f}" + ("" if place.error is None else f" ± {place.error:.5f}")


def best_line(place: VariantPlace, best: Mapping[str, Any] | None = None) -> str:
    """Return rank 1 with what it is ranked by, as text.

    >>> best_line(VariantPlace(1, "a", 0.5, 0.0, 0.0, "leads"))
    'a, loss 0.50000 on samples that nobody had trained on'
    >>> best_line(VariantPlace(1, "a", 0.5, 0.0, 0.0, "leads", held_out=0.6), {"step": 40, "folder": "saves/a/best"})
    'a, log loss 0.60000 on the samples held out, at step 40, in saves/a/best'
    """
    if place.held_out is None:
        loss = "no loss yet" if place.loss is None else f"loss {figure(place.loss, 5)}"
        return f"{place.variant}, {loss} on samples that nobody had trained on"
    at = "" if best is None else f", at step {best['step']:,}" + (f", in {best['folder']}" if best["folder"] else "")
    return f"{place.variant}, log loss {figure(place.held_out, 5)} on the samples held out{at}"


def facts_line(places: Sequence[VariantPlace], aucs: Mapping[str, float | None], rate: float) -> Facts:
    """Return the standing as the facts of one line.

    >>> places = [VariantPlace(1, "a", 0.5, 0.0, None, "leads"), VariantPlace(2, "b", 0.6, 0.1, 0.01, "races")]
    >>> list(facts_line(places, {"a": 0.7}, 1000.0).values())
    ['a', '0.50000', '0.7000', 'b +0.10000 ± 0.01000', '2 of 2', '1,000']
    """
    first = places[0]
    racing = [place for place in places if place.state in ("leads", "races")]
    second = next((place for place in racing if place.rank > 1), None)
    auc = aucs.get(first.variant)
    return {
        "leader": first.variant,
        **({} if first.held_out is None else {"held out": figure(first.held_out, 5)}),
        "loss": "none yet" if first.loss is None else figure(first.loss, 5),
        **({} if auc is None else {"AUC": f"{auc:.4f}"}),
        **({} if second is None else {"next": f"{second.variant} {difference(second)}"}),
        "racing": f"{len(racing)} of {len(places)}",
        "samples/s": f"{rate:,.0f}",
    }


def table_text(places: Sequence[VariantPlace], aucs: Mapping[str, float | None]) -> str:
    """Return the table as plain text.

    >>> print(table_text([VariantPlace(1, "a", 0.5, 0.0, None, "leads")], {}))
    rank  variant     loss  to rank 1  AUC  state
       1  a        0.50000               -  leads
    """
    lines = rows(places, aucs)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in ("state", "variant") else cell.rjust(width)
            for name, cell, width in zip(lines[0], line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


class Shown:
    """The standing of all variants, and the speed."""

    def __init__(self, standing: Callable[[], list[VariantPlace]], aucs: Callable[[], dict[str, float | None]]) -> None:
        self._standing, self._compute = standing, aucs
        self._aucs: dict[str, float | None] = {}
        self._due = 0.0
        self.speed = Speed()
        """Of the stream: each sample counts once, for all variants."""
        self._samples = 0

    def aucs(self, *, now: bool = False) -> dict[str, float | None]:
        """Return the AUCs, at most some seconds old."""
        if now or time.monotonic() >= self._due:
            self._aucs = self._compute()
            self._due = time.monotonic() + AUCS_EVERY
        return self._aucs

    def read(self, samples: int) -> None:
        """Take note of a step."""
        self._samples = samples
        self.speed.reached(samples)

    def rate(self) -> float:
        """Samples of the stream per second since the first step."""
        return self.speed.rate(self._samples)

    def facts(self) -> Facts:
        """Return the facts for one line."""
        return facts_line(self._standing(), self.aucs(), self.rate())


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
    _write_page(folder, page, facts, standings)
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
        lines["winner" if facts["winner"] else "leader"] = best_line(_place(facts["standing"][0]), facts["best"])
    if facts["cost"] is not None:
        lines["trained"] = f"{facts['cost']:.0%} of the steps of training all to the end"
    kinds = [left["kind"] for left in facts["left"]]
    said = {"dropped": "dropped at a rung", "diverged": "diverged", "patience": "no better in their evaluations"}
    if kinds:
        lines["left"] = ", ".join(f"{kinds.count(kind)} {what}" for kind, what in said.items() if kind in kinds)
    if facts["seed_noise"] is not None:
        lines["noise"] = (
            f"{facts['seed_noise']:.5f}, the standard deviation of a loss due to the seed alone"
            + SAME * bool(facts["from"])
        )
    return lines


def _write_page(folder: Path, page: Path, facts: Mapping[str, Any], standings: Sequence[Mapping[str, Any]]) -> None:
    text, places, scores = as_text(facts), facts["standing"], facts["test_auc"]
    best = text.pop("winner", None) or text.pop("leader", None)
    first = (
        f"The best of {len(facts['variants'])} variants is {best}."
        if best
        else facts["failed"] or "No step is done yet."
    )
    head, *cells = rows([_place(at) for at in places], {at["variant"]: at["auc"] for at in places}) if places else [()]
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
            Chart("difference to rank 1 at that step", _differences(order, standings, facts["left"]), "step", "loss"),
        ],
    )


def _differences(
    order: Sequence[str], standings: Sequence[Mapping[str, Any]], left: Sequence[Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """Return the differences of all but rank 1, while ranks were by losses. A line ends where its variant left."""
    gone = {one["variant"]: one["step"] for one in left}
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in order[1:]}
    for standing in standings:
        step = standing["step"]
        if standing["measure"] != "unseen" or standing["unseen"] != step:
            continue
        for at in standing["places"]:
            name = at["variant"]
            if name in lines and step <= gone.get(name, step) and finite(at["difference"]):
                lines[name].append((float(step), at["difference"]))
    return lines


def _place(at: Mapping[str, Any]) -> VariantPlace:
    return VariantPlace(**{name: value for name, value in at.items() if name != "auc"})


def _lines(folder: Path, kind: str, name: str) -> list[tuple[float, float]]:
    return [
        (float(line["step"]), float(line[name]))
        for line in lines_of(folder)
        if line["kind"] == kind and finite(line.get(name))
    ]
