"""What each trainer of a run did, gathered once when the run is over."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skirl.tools.machine import peak_bytes
from skirl.tools.page import Table
from skirl.tools.progress import clock, size

if TYPE_CHECKING:
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.meter import Meter
    from skirl.train.trainers import TrainerShare

OF_LOOP = ("rows", "dense", "lookups")
"""Channels on which the training loop itself waits for other trainers."""
MOST = 8
"""Maximum number of trainers with a line in a summary on a terminal."""


def gathered(batches: "Lookahead", meter: "Meter", share: "TrainerShare") -> dict[str, Any] | None:
    """Return the result's `by_trainer`; None if there is one trainer. All trainers call this at once, between two steps."""
    if share.alone:
        return None
    engine, times, counted = batches.engine, batches.times, share.peers.counted()
    lane = {
        "touched": len(engine.seen),
        "cache": sum(len(cache) for cache in engine.caches),
        **{name: count for name, count in asdict(engine.counters).items() if name != "steps"},
        "seconds": meter.seconds,
        "stall": times.stall,
        "read": times.read,
        "waited": sum(counted[name]["seconds"] for name in OF_LOOP if name in counted),
        "busy": dict(times.busy),
        "sent": sum(sum(of["bytes_sent"]) for of in counted.values()),
        "peak_bytes": peak_bytes(),
    }
    return {"lanes": share.told(lane, "what each trainer did")}


def parts(lane: Mapping[str, Any]) -> dict[str, float]:
    """Return where the time of a trainer's loop went, in seconds.

    >>> parts({"seconds": 9.0, "stall": 1.0, "read": 2.0, "waited": 3.0})
    {'computing': 3.0, 'waiting for other trainers': 3.0, 'waiting for rows': 1.0, 'waiting for the loader': 2.0}
    """
    waits = {
        "waiting for other trainers": lane["waited"],
        "waiting for rows": lane["stall"],
        "waiting for the loader": lane["read"],
    }
    return {"computing": max(0.0, lane["seconds"] - sum(waits.values())), **waits}


def of_all(found: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, int]:
    """Return the sums over all lanes of the counts with these names; empty if there are no lanes.

    >>> of_all({"lanes": [{"new": 3}, {"new": 4}]}, ["new"]), of_all(None, ["new"])
    ({'new': 7}, {})
    """
    return {} if found is None else {name: sum(lane[name] for lane in found["lanes"]) for name in names}


def as_lines(found: Mapping[str, Any] | None) -> dict[str, str]:
    if found is None:
        return {}
    lines = {}
    for rank, lane in enumerate(found["lanes"][:MOST]):
        lines[f"trainer {rank}"] = (
            f"{lane['touched']:,} rows touched, {lane['fetched']:,} fetched again, {size(lane['sent'])} sent; "
            f"waited {clock(lane['waited'])} for the others, {clock(lane['stall'])} for rows, {clock(lane['read'])} for the "
            "loader"
        )
    if (more := len(found["lanes"]) - MOST) > 0:
        lines["trainers"] = f"{more} more: skirl report shows all"
    return lines


def table(found: Mapping[str, Any]) -> Table:
    """Return where each trainer's time went, and what it moved."""
    lanes = found["lanes"]
    spent = [parts(lane) for lane in lanes]
    return Table(
        ["trainer", *spent[0], "rows touched", "fetched again", "written", "sent", "memory"],
        [
            [str(rank), *(f"{seconds:,.1f} s" for seconds in of.values()), f"{lane['touched']:,}", f"{lane['fetched']:,}",
             f"{lane['written']:,}", size(lane["sent"]), size(lane["peak_bytes"])]
            for rank, (lane, of) in enumerate(zip(lanes, spent, strict=True))
        ],
        "Trainers: the others wait for one that waits little for them",
    )  # fmt: skip
