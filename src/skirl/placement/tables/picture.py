"""The page of `skirl place tables`, made from its result: the same facts as in its text, drawn."""

from collections.abc import Mapping, Sequence
from typing import Any

from skirl.tools.progress import size
from skirl.train.report.page import Page
from skirl.train.report.plot import Chart

_SHOWN = 12
"""Most tables of a rank that are named."""
_UNMEASURED = "Nothing was measured: --check 20s measures the best few plans on this machine."


def drawn(result: Mapping[str, Any], tables: str) -> Page:
    """Return the page for a result.

    **Arguments**

    - `result`: result of `skirl place tables`.
    - `tables`: the file that lists the tables.
    """
    page, before, checked = Page(f"Tables over ranks: {tables}"), result["before"], result["check"]
    page.lead(result["sentence"])
    page.facts(_facts(result))
    page.heading("What each rank does in a step")
    page.lanes(_lanes(result["ranks"]), _said(result["ranks"]), "ms")
    measured = "" if checked is None else ", measured; the rest is counted bytes over the link"
    page.note(f"Computing{measured}; forward and backward are the exchange of pooled rows and of their gradients.")
    page.heading("Predicted against measured")
    if checked is None:
        page.text(_UNMEASURED)
    else:
        page.charts([_by_rank(result), _by_plan(checked)])
        page.table(
            ["plan", "predicted, ms", "measured, ms", "measured / predicted"],
            [
                [of["name"], f"{of['predicted_ms']:.3f}", f"{of['measured_ms']:.3f}",
                 f"{of['measured_ms'] / of['predicted_ms']:.2f}"]
                for of in checked["plans"]
            ],
        )  # fmt: skip
        page.note(
            f"Ranks were run one after the other, each with the processor's caches emptied; the least CPU time counts. "
            f"Measuring again differs by {checked['noise']:.1%}."
        )
    page.heading("Cost over search time")
    page.charts([_search(result), _both(result)])
    page.heading(f"Before: {before['name']}")
    page.lanes(_lanes(before["ranks"]), _said(before["ranks"]), "ms")
    page.table(["", "before", "after"], _before_and_after(result))
    page.heading("Tables")
    page.table(
        ["rank", "memory", "tables"],
        [[str(of["rank"]), _memory(of), _named(of["tables"])] for of in result["ranks"]],
    )
    return page


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    checked = result["check"]
    facts = {
        "tables": f"{result['tables']:,} on {len(result['ranks'])} ranks, {result['cut']:,} of them cut",
        "predicted": f"rank {result['busiest']} takes {result['busiest_ms']:.3f} ms, {result['balance'] - 1:.1%} above "
        "perfect balance",
    }
    if checked is not None:
        facts["measured"] = (
            f"rank {checked['busiest']} takes {checked['busiest_ms']:.3f} ms, {checked['balance'] - 1:.1%} above perfect "
            f"balance; the plan is {checked['name']!r}"
        )
    ended = "" if result["in_time"] else "; stopped by --seconds"
    return facts | {"search": f"{result['seconds']:.1f} s, {result['states']:,} ways to cut{ended}"}


def _lanes(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return {
        f"rank {of['rank']}": {
            "compute": of["compute_ms"] if of["measured_ms"] is None else of["measured_ms"],
            "forward": of["forward_ms"],
            "backward": of["backward_ms"],
        }
        for of in ranks
    }


def _said(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return {
        f"rank {n}": f"{sum(parts.values()):.3f} ms, {_memory(of)}"
        for n, (of, parts) in enumerate(zip(ranks, _lanes(ranks).values(), strict=True))
    }


def _memory(of: Mapping[str, Any]) -> str:
    return size(of["bytes"]) + ("" if of["memory"] is None else f" of {size(of['memory'])}")


def _named(tables: Sequence[str]) -> str:
    more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
    return ", ".join(tables[:_SHOWN]) + more


def _by_rank(result: Mapping[str, Any]) -> Chart:
    lines = {
        "predicted": [(float(of["rank"]), _predicted(of)) for of in result["ranks"]],
        "measured": [
            (float(of["rank"]), _predicted(of) + of["measured_ms"] - of["compute_ms"]) for of in result["ranks"]
        ],
    }
    return Chart("ms of each rank of this plan", "rank", lines, log=(False, False))


def _by_plan(checked: Mapping[str, Any]) -> Chart:
    lines = {
        how: [(float(n), of[name]) for n, of in enumerate(checked["plans"], start=1)]
        for how, name in (("predicted", "predicted_ms"), ("measured", "measured_ms"))
    }
    return Chart("ms of the busiest rank of each plan", "plan, as in the table", lines, log=(False, False))


def _search(result: Mapping[str, Any]) -> Chart:
    """Draw the best so far, as steps that end when the search did."""
    points, curve = list[tuple[float, float]](), result["curve"]
    for at, ms in curve:
        points += [(at, points[-1][1] if points else ms), (at, ms)]
    end = max(result["seconds"], curve[-1][0])
    points.append((end, curve[-1][1]))
    mean = [(points[0][0], result["mean_ms"]), (end, result["mean_ms"])]
    lines = {"busiest rank": points, "~perfect balance of the plan": mean}
    return Chart("ms predicted, best so far", "seconds of search", lines, log=(False, False), dots=False)


def _both(result: Mapping[str, Any]) -> Chart:
    """Draw the ranks of both plans, the busiest first."""
    lines = {
        name: [(float(n), of) for n, of in enumerate(sorted(map(_predicted, ranks), reverse=True), start=1)]
        for name, ranks in ((result["before"]["name"], result["before"]["ranks"]), ("this plan", result["ranks"]))
    }
    return Chart("ms predicted of each rank, the busiest first", "place", lines, log=(False, False))


def _predicted(of: Mapping[str, Any]) -> float:
    return of["compute_ms"] + of["forward_ms"] + of["backward_ms"]


def _before_and_after(result: Mapping[str, Any]) -> list[list[str]]:
    before, checked = result["before"], result["check"]
    rows = [
        ["busiest rank, predicted", f"{before['busiest_ms']:.3f} ms", f"{result['busiest_ms']:.3f} ms"],
        ["above perfect balance, predicted", f"{before['balance'] - 1:.1%}", f"{result['balance'] - 1:.1%}"],
    ]
    if checked is not None:
        was = "-" if before["measured_ms"] is None else f"{before['measured_ms']:.3f} ms"
        rows.append(["busiest rank, measured", was, f"{checked['busiest_ms']:.3f} ms"])
    return [*rows, ["too much for the memory", size(before["bytes_over"]), size(0)]]
