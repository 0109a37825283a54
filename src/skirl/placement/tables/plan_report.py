"""The report of a plan of tables: each rank's parts, what decides the maximum, the plan before, and advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skirl.placement.tables.allowed import forbidden
from skirl.placement.tables.backends import measured_elsewhere
from skirl.placement.tables.check import Checked, exchange_of
from skirl.placement.tables.named import flag_of
from skirl.placement.tables.pieces import Piece
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.problem import UNBOUND, Placed, Problem
from skirl.placement.tables.search import SearchResult
from skirl.placement.tables.spec import TableSpec
from skirl.placement.tables.wire import Wire

BALANCED = 0.02
"""If the busiest rank is above the mean by no more than this share, the ranks are equally busy."""
FAR_OFF = 0.1
"""If measured and predicted differ by more than this share, other costs are needed."""


@dataclass(frozen=True)
class Answer:
    """A plan, and what is needed to report it.

    **Arguments**

    - `specs`: the tables, in the order of their file.
    - `problem`: the problem that was searched.
    - `plan`, `placed`: the plan, in the form of its file and in that of the search.
    - `found`: the result of the search.
    - `name`, `before`: name and placement of the plan that it is compared with.
    - `measured`: the measurements; None: nothing was measured.
    - `wire`: the measured exchange that the link's rate comes from; None: the rate was given.
    - `seconds`: the time that the search was given.
    """

    specs: Sequence[TableSpec]
    problem: Problem
    plan: TablePlan
    placed: Placed
    found: SearchResult
    name: str
    before: Placed
    measured: Checked | None
    wire: Wire | None
    seconds: float


def answered(answer: Answer) -> dict[str, Any]:
    """Return everything that is reported, as JSON has it.

    **Arguments**

    - `answer`: the plan.
    """
    problem, plan, placed, found, checked = answer.problem, answer.plan, answer.placed, answer.found, answer.measured
    ms = None if checked is None else checked.best.compute
    ranks = parts_of(problem, placed, ms, answer.wire)
    for rank, of in enumerate(ranks):
        mine = (n for n, pieces in enumerate(plan.pieces) if any(at == rank for _, at in pieces))
        of |= {"tables": [plan.said(number) for number in mine]}
    busiest, mean = int(placed.load.argmax()), float(placed.load.mean())
    result: dict[str, Any] = {
        "tables": len(answer.specs), "cut": sum(len(pieces) > 1 for pieces in plan.pieces), "ranks": ranks,
        "busiest": busiest, "busiest_ms": float(placed.load[busiest]), "mean_ms": mean,
        "balance": float(placed.load[busiest] / mean), "seconds": found.seconds, "states": found.states,
        "in_time": found.in_time, "curve": [[at, ms] for at, over, ms in found.curve if not over],
        "noise": problem.costs.noise, "costs": problem.costs.kind,
        "costs_from": measured_elsewhere(problem.costs),
        "exchange": None if answer.wire is None else answer.wire.said(), "before": _before(answer), "check": _check(answer),
    }  # fmt: skip
    return result | {"sentence": advice(answer, result)}


def parts_of(problem: Problem, placed: Placed, measured: np.ndarray | None, wire: Wire | None) -> list[dict[str, Any]]:
    """Return the memory of each rank, and what it computes and exchanges in a step.

    **Arguments**

    - `problem`: tables, ranks and costs.
    - `placed`: a plan.
    - `measured`: milliseconds that each rank computes; None: not measured.
    - `wire`: the measured exchange, which tells forward and backward apart; None, or one of another number of ranks:
      each takes half.
    """
    ranks, exchange = problem.ranks, exchange_of(problem, placed)
    slow = ranks.slow if placed.slow is None else placed.slow
    parts = []
    for rank, cap in enumerate(ranks.caps):
        compute = sum(problem.cost(p)[0] for p in placed.pieces(rank)) * slow[rank]
        parts.append({
            "rank": rank, "bytes": int(placed.used[rank]), "memory": None if cap >= UNBOUND else cap,
            "compute_ms": float(compute), "forward_ms": float(exchange[rank] / 2),
            "backward_ms": float(exchange[rank] / 2),
            "measured_ms": None if measured is None else float(measured[rank]),
        })  # fmt: skip
    count = len(parts)
    if wire is not None and wire.ranks == count:
        nbytes = [sum(problem.specs[p.table].batch * p.dim * 4.0 for p in placed.pieces(rank)) for rank in range(count)]
        starts = np.array([[part["compute_ms"] for part in parts]])
        ways = wire.told(np.array([nbytes]) * (count - 1) / count, starts)
        for part, forward, backward in zip(parts, ways[0][0].tolist(), ways[1][0].tolist(), strict=True):
            part |= {"forward_ms": forward, "backward_ms": backward}
    return parts


def _before(answer: Answer) -> dict[str, Any]:
    """Return figures of the plan that this one is compared with."""
    problem, before = answer.problem, answer.before
    tried = [] if answer.measured is None else [of for of in answer.measured.tried if of.name == answer.name]
    measured = tried[0].compute if tried else None
    return {
        "name": answer.name, "ranks": parts_of(problem, before, measured, answer.wire), "busiest_ms": before.score[1],
        "balance": float(before.load.max() / before.load.mean()), "bytes_over": before.score[0],
        "measured_ms": tried[0].busiest if tried else None,
        "forbidden": forbidden(problem, before), "moves": moved_bytes(problem.specs, before, answer.placed),
    }  # fmt: skip


def moved_bytes(specs: Sequence[TableSpec], before: Placed, after: Placed) -> int:
    """Return the bytes of rows, with their state, that move to another rank.

    **Arguments**

    - `specs`: the tables.
    - `before`, `after`: two plans of them.
    """
    at: dict[int, list[tuple[Piece, int]]] = {}
    for item, rank in zip(before.items, before.at.tolist(), strict=True):
        for piece in item:
            at.setdefault(piece.table, []).append((piece, rank))
    moved = 0
    for item, rank in zip(after.items, after.at.tolist(), strict=True):
        for p in item:
            for q, was in at[p.table]:
                rows = min(p.row_end, q.row_end) - max(p.row, q.row)
                dim = min(p.col_end, q.col_end) - max(p.col, q.col)
                if was != rank and rows > 0 and dim > 0:
                    moved += specs[p.table].nbytes(rows, dim)
    return moved


def _check(answer: Answer) -> dict[str, Any] | None:
    checked = answer.measured
    if checked is None:
        return None
    best = checked.best
    busiest = best.compute + exchange_of(answer.problem, best.placed)
    return {
        "name": best.name, "busiest": int(busiest.argmax()), "busiest_ms": best.busiest,
        "balance": float(busiest.max() / busiest.mean()), "noise": checked.noise, "seconds": checked.seconds,
        "plans": [
            {"name": of.name, "predicted_ms": of.predicted, "measured_ms": of.busiest, "after": of.after}
            for of in checked.tried
        ],
    }  # fmt: skip


def advice(answer: Answer, result: dict[str, Any]) -> str:
    """Return one sentence of advice, with flags to copy.

    **Arguments**

    - `answer`: the plan.
    - `result`: the other facts that are reported.
    """
    problem, checked, found = answer.problem, result["check"], answer.found
    told = result if checked is None else checked
    gap, ranks = told["balance"] - 1, len(problem.ranks.caps)
    busiest = result["ranks"][told["busiest"]]
    if not found.in_time:
        return f"The search ran out of time: set --seconds {max(2, round(4 * answer.seconds))}."
    if gap <= BALANCED:
        if busiest["compute_ms"] <= 2 * busiest["forward_ms"]:
            return "The ranks are busy alike and exchange more than they compute: a faster --link, or fewer --ranks."
        if checked is None:
            return "The ranks are predicted to be busy alike: measure the plan with --check 20s before you use it."
        return f"The ranks are busy alike: for a shorter step set --ranks {2 * ranks}."
    if checked is not None and abs(busiest["measured_ms"] / max(busiest["compute_ms"], 1e-9) - 1) > FAR_OFF:
        why = "Measured times are far from the costs"
        if result["costs_from"] is not None:
            why = f"The costs are from another machine, {result['costs_from']}"
        return f"{why}: run skirl place costs{flag_of(problem.costs.backend)} --out costs.json, and set --costs costs.json."
    if not problem.rows:
        return "A table that is not cut keeps one rank busy: leave --no-rows out."
    fewer = max(1, ranks - 1)
    if len(busiest["tables"]) == 1:
        name, cut, _ = busiest["tables"][0].partition(" (")
        if cut:
            room = " or more --memory" if min(problem.ranks.caps) < UNBOUND else ""
            return f"{name} is cut, and no other cut that fits makes the ranks more alike: set --ranks {fewer}{room}."
        if problem.columns == "exact" and any(spec.one_state for spec in problem.specs if spec.name == name):
            return (
                f"{name} keeps a rank busy alone; cut by columns it would train another model, since its optimizer keeps "
                f"one number a row: set --ranks {fewer}, or --columns always and measure."
            )
    return (
        "Tables that are pinned, too small to cut or not allowed to be cut keep one rank busy: set "
        f"--ranks {fewer}, or unpin them."
    )
