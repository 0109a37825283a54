"""The page of `skirl place`, made from its result and from the bytes that each site moves in each step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.core.placement import Placement
from skirl.placement.loads import Loads
from skirl.tools.progress import size
from skirl.train.report.page import Page
from skirl.train.report.plot import COLORS, Chart

_DRAWN = len(COLORS)
"""Most sites that get a line, each in a colour of its own."""


@dataclass(frozen=True)
class Steps:
    """Bytes read and written by site, [steps, sites].

    **Arguments**

    - `planned`: under the plan, in the steps that the cuts come from.
    - `after`, `before`: in the remaining steps, under the plan and under the placement that it is compared with.
    """

    planned: np.ndarray
    after: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, loads: Loads, plan: Placement, before: Placement, first: slice, rest: slice) -> "Steps":
        """Count the bytes of two placements.

        **Arguments**

        - `loads`: the moves of the run.
        - `plan`, `before`: the two placements.
        - `first`, `rest`: the steps that the cuts come from, and the remaining ones.
        """
        found = [loads.scored(at, which) for at, which in ((plan, first), (plan, rest), (before, rest))]
        return cls(*(of.bytes_read + of.bytes_written for of in found))


def drawn(result: Mapping[str, Any], steps: Steps) -> Page:
    """Return the page for a result.

    **Arguments**

    - `result`: result of `skirl place`.
    - `steps`: bytes that the sites move.
    """
    page, before = Page(f"Where rows live: {result['data']}"), result["before"]
    page.lead(result["sentence"])
    facts = {
        "moved": f"{result['rows_read']:,} rows read and {result['rows_written']:,} written in {result['steps']:,} steps, "
        "counted",
        "held": f"{size(result['held'])} of rows that the run uses",
        "busiest": f"{result['imbalance']:.3f} times the mean of the sites' bytes; {before['imbalance']:.3f} by "
        f"{before['name']}",
    }
    if result["moves"] is not None:
        facts["moves"] = f"{size(result['moves'])} of rows go to another site"
    if result["hidden"] is not None:
        facts["hidden"] = f"{result['hidden']:.0%} of the movement, estimated"
    page.facts(facts)
    page.heading("Sites")
    page.table(
        ["site", "store", "holds", "of memory", "reads a step", "writes a step", "busy, ms a step"],
        [
            [
                site["name"], site["store"], size(site["held"]), "-" if site["memory"] is None else size(site["memory"]),
                size(site["read"]), size(site["written"]), "-" if site["busy_ms"] is None else f"{site['busy_ms']:.2f}",
            ]
            for site in result["sites"]
        ],
    )  # fmt: skip
    page.heading("Loads by site and step")
    names = [site["name"] for site in result["sites"]]
    shown = _shown(steps, names)
    colors = dict(zip(shown.values(), COLORS, strict=False))
    page.keys(colors)
    page.charts([
        _by_step("KiB of each site, this plan", steps.after, shown, colors),
        _by_step(f"KiB of each site, {before['name']}", steps.before, shown, colors),
    ])  # fmt: skip
    if max(steps.after.shape[1], steps.before.shape[1]) > _DRAWN:
        page.note(f"The {_DRAWN} busiest sites are drawn.")
    page.heading("Predicted against counted")
    page.charts([_predicted(steps), _busiest(steps, before["name"])])
    page.table(
        ["site", "predicted, of all bytes", "counted, of all bytes"],
        [
            [name, f"{planned:.2%}", f"{found:.2%}"]
            for name, planned, found in zip(names, _shares(steps.planned), _shares(steps.after), strict=True)
        ],
    )
    page.note(
        "Cuts come from the first half of the run, and so does what is predicted; counted is the second half, by the code "
        "that plans a training run. What a step moves is a count, not an estimate."
    )
    if result["exchange"] is not None:
        _exchange(page, result["exchange"])
    page.heading("Before and after")
    page.bars({
        before["name"]: (before["imbalance"], f"busiest site {before['imbalance']:.3f} times the mean, "
                         f"{before['vs_this']:.2f} times as long"),
        "this plan": (result["imbalance"], f"busiest site {result['imbalance']:.3f} times the mean"),
    })  # fmt: skip
    return page


def _exchange(page: Page, facts: Mapping[str, Any]) -> None:
    page.heading(f"What {facts['trainers']} trainers would exchange in a step")
    page.table(
        ["table", "as rows", "owners by hash", "as their partial sums", "as pooled vectors", "better"],
        [
            [of["name"], *(size(of[way]) for way in ("rows", "hashed", "partial", "pooled")), of["better"]]
            for of in [*facts["tables"], {**facts, "name": "all", "better": size(facts["better"])}]
        ],
    )
    page.note(
        "Counted from the ids: vectors there and gradients back; ids travel ahead of time and are left out. As rows, a row "
        "goes from an owner among its readers; skirl's trainers have owners by hash today, and exchange rows "
        "only. A partial sum goes from such an owner to each sample of another trainer that looks up any of its rows."
    )


def _shown(steps: Steps, names: list[str]) -> dict[int, str]:
    """Return the names of the sites to draw, by number: those that are busiest under either placement."""
    sums = np.zeros(max(steps.after.shape[1], steps.before.shape[1]))
    for moved in (steps.after, steps.before):
        sums[: moved.shape[1]] = np.maximum(sums[: moved.shape[1]], moved.sum(axis=0))
    busiest = sorted(np.argsort(-sums, kind="stable")[:_DRAWN].tolist())
    return {site: names[site] if site < len(names) else f"left out {site - len(names)}" for site in busiest}


def _by_step(title: str, moved: np.ndarray, shown: Mapping[int, str], colors: Mapping[str, str]) -> Chart:
    lines = {
        name: [(float(n), of / 1024) for n, of in enumerate(moved[:, site].tolist(), start=1)]
        for site, name in shown.items()
        if site < moved.shape[1] and len(moved)
    }
    colors, lines = (colors, lines) if lines else ({}, {"none": [(0.0, 0.0)]})
    return Chart(title, "step of the second half", lines, log=(False, False), dots=False, colors=colors)


def _busiest(steps: Steps, name: str) -> Chart:
    lines = {
        how: [(float(n), of / 1024) for n, of in enumerate(moved.max(axis=1).tolist(), start=1)]
        for how, moved in ((name, steps.before), ("this plan", steps.after))
    }
    return Chart("KiB of the busiest site", "step of the second half", lines, log=(False, False), dots=False)


def _shares(moved: np.ndarray) -> list[float]:
    sums = moved.sum(axis=0)
    return (sums / max(1, sums.sum())).tolist()


def _predicted(steps: Steps) -> Chart:
    lines = {
        how: [(float(site), 100 * share) for site, share in enumerate(_shares(of))]
        for how, of in (("predicted", steps.planned), ("counted", steps.after))
    }
    return Chart("% of all bytes at each site", "site", lines, log=(False, False))
