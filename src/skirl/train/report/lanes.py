"""A record of what each trainer of a run did, and who sent what to whom, gathered once when the run is over."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from skirl.tools.machine import peak_bytes
from skirl.tools.page import Table
from skirl.tools.progress import clock, size
from skirl.tools.sealed_json import AMOUNT, COUNT

if TYPE_CHECKING:
    from skirl.pipeline.lookahead import Lookahead
    from skirl.train.meter import Meter
    from skirl.train.trainers import TrainerShare

OF_LOOP = ("rows", "dense", "lookups")
"""Channels on which the training loop itself waits for other trainers."""
MOST = 8
"""Maximum number of trainers with a line in a summary on a terminal."""
_LANE = dict.fromkeys(("touched", "cache", "fetched", "new", "written", "peak_bytes"), COUNT) | {
    **dict.fromkeys(("seconds", "stall", "read"), AMOUNT),
    "waited": {...: AMOUNT},
}
FORM: dict[str, Any] = {"lanes": [_LANE], "bytes": [[COUNT]], "rows": {...: [[COUNT]]}}
"""The form of `by_trainer` that a report needs."""


def gathered(batches: "Lookahead", meter: "Meter", share: "TrainerShare") -> dict[str, Any] | None:
    """Return the result's `by_trainer`; None if there is one trainer. All trainers call this at once, between two steps."""
    if share.alone:
        return None
    engine, times, counted = batches.engine, batches.times, share.peers.counted()
    sent = [sum(of["bytes_sent"][rank] for of in counted.values()) for rank in range(share.size)]
    mine = {
        "touched": len(engine.seen),
        "cache": sum(len(cache) for cache in engine.caches),
        **{name: count for name, count in asdict(engine.counters).items() if name != "steps"},
        "seconds": meter.seconds,
        "stall": times.stall,
        "read": times.read,
        "waited": {name: of["seconds"] for name, of in counted.items()},
        "busy": dict(times.busy),
        "peak_bytes": peak_bytes(),
    }
    told = share.told({"lane": mine, "sent": sent, "asked": engine.asked.T.tolist()}, "what each trainer did")
    names = [table.name for table in engine.schema.tables]
    return {
        "lanes": [their["lane"] for their in told],
        "bytes": [their["sent"] for their in told],
        "rows": {name: [their["asked"][t] for their in told] for t, name in enumerate(names)},
    }


def waited(lane: Mapping[str, Any]) -> float:
    return sum(lane["waited"].get(name, 0.0) for name in OF_LOOP)


def parts(lane: Mapping[str, Any]) -> dict[str, float]:
    """Return where the time of a trainer's loop went, in seconds.

    >>> parts({"seconds": 9.0, "stall": 1.0, "read": 2.0, "waited": {"rows": 3.0, "ids": 8.0}})
    {'computing': 3.0, 'waiting for other trainers': 3.0, 'waiting for rows': 1.0, 'waiting for the loader': 2.0}
    """
    waits = {
        "waiting for other trainers": waited(lane),
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
            f"{lane['touched']:,} rows touched, {lane['fetched']:,} fetched again, {size(sum(found['bytes'][rank]))} sent; "
            f"waited {clock(waited(lane))} for the others, {clock(lane['stall'])} for rows, {clock(lane['read'])} for the "
            "loader"
        )
    if (more := len(found["lanes"]) - MOST) > 0:
        lines["trainers"] = f"{more} more: skirl report shows all"
    return lines


def check(where: str, found: Mapping[str, Any]) -> None:
    """Raise if other numbers are for more or fewer trainers than there are lanes."""
    size = len(found["lanes"])
    for name, pairs in [("bytes", found["bytes"]), *found["rows"].items()]:
        if [len(of) for of in pairs] != [size] * size:
            raise ValueError(
                f"{where} is damaged: it has {size} trainers, and {name} for another number of them: name another run"
            )


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Return where each trainer's time went, the rows that it owns, and who sent what to whom."""
    lanes, ranks = found["lanes"], range(len(found["lanes"]))
    counts = ("touched", "cache", "fetched", "new", "written")
    spent = [parts(lane) for lane in lanes]
    return [
        Table(
            ["trainer", *spent[0], "all"],
            [[str(rank), *(f"{s:,.1f} s" for s in of.values()), f"{lanes[rank]['seconds']:,.1f} s"]
             for rank, of in enumerate(spent)],
            "Where the time of each trainer went: the others wait for one that waits little for them",
        ),
        Table(
            ["trainer", "touched", "in its cache", "fetched again", "made", "written", "memory"],
            [[str(rank), *(f"{lane[name]:,}" for name in counts), size(lane["peak_bytes"])]
             for rank, lane in enumerate(lanes)],
            "Rows that each trainer owns",
        ),
        Table(
            ["bytes", *(f"to {rank}" for rank in ranks)],
            [[f"from {rank}", *("-" if to == rank else size(found["bytes"][rank][to]) for to in ranks)]
             for rank in ranks],
            "Who sent what to whom",
        ),
    ]  # fmt: skip
