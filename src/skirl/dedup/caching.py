"""The load of a cache on sessions, by order of samples: ids scanned, rows of the largest batch, and rows fetched again."""

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from skirl.core.tables import Schema
from skirl.data.flags import DataFlags
from skirl.dedup.commands import Convert
from skirl.measure.sizing.survey import Survey
from skirl.oracle.options import Plan
from skirl.pipeline.simulate import simulate

BATCH = 512
SHARES = (0.75, 0.5, 0.25)
"""Cache capacities, as shares of all rows used."""


def cached(mind: str) -> dict[str, Any]:
    """Measure the items of a behaviors.tsv with its samples shuffled one by one, in order of time, and by session.

    **Arguments**

    - `mind`: path of the file.
    """
    with tempfile.TemporaryDirectory(prefix="skirl-") as folder, ExitStack() as stack:
        out = Path(folder) / "sessions"
        rows = Convert(f"mind:{mind}", str(out), by="session", quiet=True).run()["samples"]
        sources = {
            "shuffled": DataFlags(f"mind:{mind}", batch=BATCH, shuffle=rows),
            "time": DataFlags(f"mind:{mind}", batch=BATCH),
            "session": DataFlags(f"parquet:{out}", batch=BATCH),
        }
        items = [table for table in sources["time"].stream().tables(1) if table.name == "item"]
        schema = Schema.of(items)  # only items: a user's samples are contiguous in any order but a shuffled one
        seen = {
            name: stack.enter_context(_surveyed(schema, (batch.sparse.expanded() for batch in flags.stream())))
            for name, flags in sources.items()
        }
        once = stack.enter_context(_surveyed(schema, (batch.sparse for batch in sources["session"].stream())))
        used = sum(seen["time"].touched)
        largest = {name: int(survey.used.sum(axis=0).max()) for name, survey in seen.items()}
        again = {
            f"{share:g}": {order: _again(survey, int(used * share)) for order, survey in seen.items()}
            for share in SHARES
        }
        same = all(_again(once, int(used * share)) == again[f"{share:g}"]["session"] for share in SHARES)
        scanned = {"shuffled": seen["shuffled"].ids / seen["shuffled"].steps, "distinct": once.ids / once.steps}
    return {
        "batch": BATCH,
        "rows": used,
        "ids_scanned": {name: round(ids) for name, ids in scanned.items()},
        "ids_scanned_x": round(scanned["shuffled"] / scanned["distinct"], 2),
        "largest_batch": largest,
        "least_rows_x": round(largest["shuffled"] / largest["session"], 2),
        "brought_in_again": again,
        "same_with_and_without": same,
    }


def _surveyed(schema: Schema, batches: Iterable[Any]) -> Survey:
    survey = Survey(schema)
    for sparse in batches:
        survey.add(sparse)
    return survey


def _again(survey: Survey, capacity: int) -> int | None:
    """Return the number of rows that a cache of `capacity` rows fetches again; None if a batch does not fit in it."""
    if survey.used.sum(axis=0).max() > capacity:
        return None
    return simulate(survey.narrowed(), survey.batches(), [capacity], Plan(depth="epoch")).fetched


def told_of(found: dict[str, Any]) -> dict[str, str]:
    """Return the result as labelled lines for people to read.

    **Arguments**

    - `found`: what `cached` returned.
    """
    scanned, least = found["ids_scanned"], found["largest_batch"]
    told = {
        "ids scanned": f"{scanned['distinct']:,} a batch by session, each list once; {scanned['shuffled']:,} shuffled: "
        f"{found['ids_scanned_x']:.1f}x",
        "least cache": f"{least['session']:,} rows by session, {least['shuffled']:,} shuffled: {found['least_rows_x']:.1f}x",
    }
    for name, by_order in found["brought_in_again"].items():
        counts = ", ".join(
            f"{order} {'does not fit' if count is None else f'{count:,}'}" for order, count in by_order.items()
        )
        told[f"{float(name):.0%} of rows"] = f"brought in again: {counts}"
    told["lists once"] = "as many rows brought in again as with all lists"
    if not found["same_with_and_without"]:
        told["lists once"] = "other rows brought in again than with all lists: please report it"
    return told
