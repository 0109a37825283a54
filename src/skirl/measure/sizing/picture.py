"""The page of `skirl size`: the facts of its text output, with the curves drawn."""

from collections.abc import Mapping
from typing import Any

from skirl.tools.progress import size
from skirl.train.report.page import Page
from skirl.train.report.plot import Chart


def drawn(result: Mapping[str, Any]) -> Page:
    """Return the page of a result."""
    page = Page(f"How much cache: {result['data']}")
    page.lead(result["sentence"])
    used, tiers = max(1, result["used"]), result["bytes"]
    page.facts(
        {
            "asked": f"{result['steps']:,} batches of {result['batch']:,} samples, {result['ids']:,} ids",
            "model": f"{result['model']}, dim {result['dim']}, {result['optimizer']}",
            "touched": f"{result['touched']:,} of {result['rows']:,} rows, {size(tiers['touched'])} of {size(tiers['all'])}",
            "a batch uses": f"{used / result['steps']:,.0f} distinct rows on average, {result['largest']:,} at most",
        }
    )
    page.heading("Rows brought in again")
    page.charts([_moved(result), _in_bytes(result)])
    page.note(
        "Counted by the planner that trains, on this data. The lowest line is Belady's minimum: no cache of that size can "
        "bring in fewer rows. A row used for the first time is made on the device and never counted here."
    )
    names = list(result["curves"])
    sizes = [point["cache"] for point in result["curves"][names[0]]]
    page.table(
        ["cache, rows", "of the touched", *names],
        [
            [
                f"{cache:,}",
                f"{cache / max(1, result['touched']):.0%}",
                *(f"{result['curves'][name][i]['moved'] / used:.2%}" for name in names),
            ]
            for i, cache in enumerate(sizes)
        ],
    )
    page.heading("Where rows would lie")
    page.table(
        ["tier", "bytes", "what"],
        [
            ["device", size(tiers["cache"]), "the cache that is advised"],
            ["device", size(tiers["staging"]), "staging: rows on their way"],
            ["memory", size(tiers["planner"]), "the oracle's window"],
            ["memory", size(tiers["touched"]), "touched rows, with --store memory"],
            ["disk", size(tiers["disk"]), "touched rows, with --store disk:FOLDER, at most"],
            ["memory", size(tiers["index"]), "the disk store's index"],
            ["none", size(tiers["all"]), "all rows of all tables, which no tier has to hold"],
        ],
    )
    if result["step_ms_that_hides"] is not None:
        page.heading("Hiding the movement")
        hidden = (
            ""
            if result["hidden"] is None
            else f" With a step of {result['step_ms']:g} ms, {result['hidden']:.0%} of the movement is hidden."
        )
        page.text(
            f"Over {result['link']} this cache keeps up if a step computes for {result['step_ms_that_hides']:.2f} ms or "
            f"more.{hidden} Both are estimates: the counts are exact, the store's own time is left out."
        )
    if result["reductions"]:
        page.heading("Smaller rows")
        page.table(
            ["rows as", "bytes a row", "touched rows", "rows in the same bytes of cache", "brought in again a step"],
            [
                [
                    kind["rows as"],
                    f"{kind['record_bytes']:,}",
                    size(kind["touched_bytes"]),
                    f"{kind['cache_rows']:,}",
                    size(kind["bytes_a_step"]),
                ]
                for kind in result["reductions"]
            ],
        )
        page.note(
            "Only training can tell what they cost in quality. Rows of 16 bits need dtype=torch.bfloat16 or float16 in "
            "Python, and a GPU."
        )
    page.heading("The data")
    page.charts([_working_set(result), _new(result)])
    page.table(
        ["table", "rows", "touched", "accesses", "hottest 1% of touched take", "hottest 10%"],
        [
            [
                table["name"],
                f"{table['rows']:,}",
                f"{table['touched']:,}",
                f"{table['accesses']:,}",
                f"{table['hottest']['1%']:.0%}",
                f"{table['hottest']['10%']:.0%}",
            ]
            for table in result["tables"]
        ],
    )
    return page


def _moved(result: Mapping[str, Any]) -> Chart:
    used = max(1, result["used"])
    lines = {
        name: [(point["cache"], 100 * point["moved"] / used) for point in points]
        for name, points in result["curves"].items()
    }
    return Chart("% of the rows used that come in again", "rows of cache", lines, log=(True, False))


def _in_bytes(result: Mapping[str, Any]) -> Chart:
    lines = {
        name: [(point["cache"], point["bytes_a_step"] / 2**20) for point in result["curves"][name]]
        for name in ("depth 200", "LRU")
    }
    return Chart("MiB read and written a step", "rows of cache", lines, log=(True, False))


def _working_set(result: Mapping[str, Any]) -> Chart:
    points = [(float(window), rows) for window, rows in result["working_set"].items() if rows > 0]
    return Chart("working set: distinct rows of so many batches", "batches", {"rows": points or [(1.0, 1.0)]})


def _new(result: Mapping[str, Any]) -> Chart:
    points = [(float(i), float(n)) for i, n in enumerate(result["new_a_batch"], start=1)]
    return Chart("rows never used before", "batch", {"rows": points}, log=(False, False), dots=False)
