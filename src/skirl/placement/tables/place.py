"""What `skirl place tables` does: reads tables and costs, searches, checks the plan once more, and says what it is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from skirl.placement.tables.costs import SHIPPED, Costs, load_costs
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.problem import Columns, Placed, Problem, Ranks, canonical
from skirl.placement.tables.search import Found, search
from skirl.placement.tables.spec import TableSpec, read_specs
from skirl.tools.progress import size

_NAMED = 3


@dataclass(frozen=True)
class Question:
    """Which tables, where, and how long to search; the fields are the flags of `skirl place tables`.

    `link` is None where the rate is that of the costs.
    """

    tables: Path
    ranks: Ranks
    costs: Path | None
    link: float | None
    columns: Columns
    rows: bool
    seconds: float
    seed: int
    out: Path | None


def placed_tables(question: Question) -> dict[str, Any]:
    """The plan, what is predicted of it, and a sentence.

    **Arguments**

    - `question`: of the command.
    """
    specs, count = read_specs(question.tables), len(question.ranks.caps)
    costs = load_costs(question.costs or SHIPPED, link=question.link or 1.0, ranks=count)
    if question.link is None:
        if costs.wire is None:
            raise ValueError(
                "the costs have no measured exchange: measure it with `skirl place costs --exchange 2`, or set --link to "
                "a rate like 10Gbit"
            )
        costs = replace(costs, link=costs.wire.rate)
    plan, found, problem = planned(
        specs, question.ranks, costs, columns=question.columns, rows=question.rows, seconds=question.seconds,
        seed=question.seed,
    )  # fmt: skip
    if question.out is not None:
        plan.save(question.out)
    return _result(question, specs, plan, found, problem)


def planned(
    specs: Sequence[TableSpec], ranks: Ranks, costs: Costs, *, columns: Columns = "exact", rows: bool = True,
    seconds: float = 30.0, seed: int = 0,
) -> tuple[TablePlan, Found, Problem]:  # fmt: skip
    """A plan within all memory, what the search found, and what it searched; a ValueError where none fits.

    **Arguments**

    - `specs`: the tables.
    - `ranks`: where they may be.
    - `costs`: of parts of tables.
    - `columns`, `rows`: how tables may be cut.
    - `seconds`: to search.
    - `seed`: of what is left to chance.
    """
    order = canonical(specs)
    problem = Problem([specs[n] for n in order], ranks, costs, columns, rows)
    held = [spec.nbytes(spec.rows, spec.dim) for spec in specs]
    if sum(held) > sum(ranks.caps):
        raise ValueError(_no_room(specs, held, ranks.caps))
    found = search(problem, seconds=seconds, seed=seed)
    over = over_caps(problem, found.placed)
    if max(over) > 0:
        raise ValueError(_not_found(problem, found.placed, over))
    return TablePlan.of(specs, order, found.placed), found, problem


def over_caps(problem: Problem, placed: Placed) -> list[int]:
    """Bytes by which each rank is over its memory, added up from the pieces, not as the search has kept them.

    **Arguments**

    - `problem`: tables and ranks.
    - `placed`: of the search.
    """
    over = [-cap for cap in problem.ranks.caps]
    for item, rank in zip(placed.items, placed.at.tolist(), strict=True):
        for piece in item:
            over[rank] += problem.specs[piece.table].nbytes(piece.rows, piece.dim)
    return [max(0, bytes_over) for bytes_over in over]


def _no_room(specs: Sequence[TableSpec], held: Sequence[int], caps: Sequence[int]) -> str:
    lacks = sum(held) - sum(caps)
    largest = ", ".join(
        f"{specs[n].name} {size(held[n])}" for n in sorted(range(len(held)), key=lambda n: -held[n])[:_NAMED]
    )
    more = math.ceil(lacks / (sum(caps) / len(caps)))
    return (
        f"the tables take {size(sum(held))} with their optimizer state ({largest}), the ranks hold {size(sum(caps))}, "
        f"{lacks:,} bytes too few: set --memory higher, or --ranks to {len(caps) + more}"
    )


def _not_found(problem: Problem, placed: Placed, over: Sequence[int]) -> str:
    worst = max(range(len(over)), key=lambda r: over[r])
    bound = [
        item
        for item, at in zip(placed.items, placed.at.tolist(), strict=True)
        if at == worst and not problem.ways(item)
    ]
    names = sorted({problem.specs[p.table].name for item in bound for p in item})[:_NAMED]
    why = f" ({', '.join(names)} may not be cut)" if names else ""
    cuts = "let tables be cut by rows, " if names or not problem.rows else ""
    return (
        f"no plan that was found fits: rank {worst} is over its memory by {over[worst]:,} bytes{why}: {cuts}set --memory "
        "higher, or --ranks"
    )


def _result(
    question: Question, specs: Sequence[TableSpec], plan: TablePlan, found: Found, problem: Problem
) -> dict[str, Any]:
    placed, ranks = found.placed, problem.ranks
    slow = ranks.slow if placed.slow is None else placed.slow
    parts = []
    by_rank: dict[int, list[int]] = {r: [] for r in range(plan.ranks)}
    for number, pieces in enumerate(plan.pieces):
        for rank in sorted({rank for _, rank in pieces}):
            by_rank[rank].append(number)
    for rank in range(plan.ranks):
        pieces = placed.pieces(rank)
        compute = sum(problem.cost(p)[0] for p in pieces) * slow[rank]
        exchange = sum(problem.cost(p)[1] for p in pieces) * ranks.far[rank]
        parts.append({
            "rank": rank,
            "tables": [plan.said(number) for number in by_rank[rank]],
            "bytes": int(placed.used[rank]),
            "memory": None if question.ranks.caps[rank] >= 1 << 52 else question.ranks.caps[rank],
            "compute_ms": float(compute),
            "forward_ms": float(exchange / 2),
            "backward_ms": float(exchange / 2),
        })  # fmt: skip
    wire = problem.costs.wire if question.link is None else None
    if wire is not None and wire.ranks == plan.ranks:
        nbytes = [
            sum(specs[n].batch * p.dim * 4.0 for n, of in enumerate(plan.pieces) for p, at in of if at == rank)
            for rank in range(plan.ranks)
        ]
        starts = np.array([[part["compute_ms"] for part in parts]])
        ways = wire.told(np.array([nbytes]) * (plan.ranks - 1) / plan.ranks, starts)
        for part, forward, backward in zip(parts, ways[0][0].tolist(), ways[1][0].tolist(), strict=True):
            part |= {"forward_ms": forward, "backward_ms": backward}
    busiest = int(placed.load.argmax())
    mean = float(placed.load.mean())
    cut = sum(len(pieces) > 1 for pieces in plan.pieces)
    result = {
        "tables": len(specs), "ranks": parts, "busiest": busiest, "busiest_ms": float(placed.load[busiest]),
        "balance": float(placed.load[busiest] / mean), "cut": cut, "seconds": found.seconds, "states": found.states,
        "in_time": found.in_time, "noise": problem.costs.noise, "costs": problem.costs.kind,
        "exchange": None if wire is None else wire.said(), "out": None if question.out is None else str(question.out),
    }  # fmt: skip
    return result | {"sentence": _advice(question, result, parts[busiest], specs, problem)}


def _advice(
    question: Question, result: dict[str, Any], busiest: dict[str, Any], specs: Sequence[TableSpec], problem: Problem
) -> str:
    gap = result["balance"] - 1
    if gap <= 0.02:
        held = "The ranks are busy alike: a better plan would have to do less work, not divide it better."
        return held + (
            " More ranks would make a step shorter." if busiest["compute_ms"] > busiest["forward_ms"] else ""
        )
    if not result["in_time"]:
        return f"The search ran out of time: set --seconds to {max(2, round(4 * question.seconds))}."
    lone = len(busiest["tables"]) == 1
    if not question.rows:
        return "A table that is not cut keeps one rank busy: leave --no-rows out."
    if lone and any(spec.one_state for spec in specs) and question.columns == "exact":
        return (
            f"{busiest['tables'][0]} keeps a rank busy alone; cut by columns it would train another model, since its "
            "optimizer keeps one number a row: use fewer ranks, or adagrad and measure."
        )
    return "What may not be cut or is too small to cut keeps a rank busy: use fewer ranks, or unpin what is pinned."
