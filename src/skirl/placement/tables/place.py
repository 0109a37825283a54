"""The work of `skirl place tables`: read tables and costs, search, measure, and check the plan once more."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from skirl.placement.tables.allowed import forbidden
from skirl.placement.tables.backends import arena_of, check_dims, check_optimizers, check_there
from skirl.placement.tables.check import Bench, Checked, candidates, checked
from skirl.placement.tables.costs import Costs, costs_for
from skirl.placement.tables.evenly import search_evenly
from skirl.placement.tables.named import OURS, Backend, flag_of
from skirl.placement.tables.pieces import whole
from skirl.placement.tables.plan_file import TablePlan
from skirl.placement.tables.plan_report import Answer, answered
from skirl.placement.tables.problem import Columns, Placed, Problem, Ranks, canonical
from skirl.placement.tables.search import SearchResult, search
from skirl.placement.tables.spec import TableSpec, read_specs
from skirl.tools.progress import Progress, size

ROUND_ROBIN = "round robin"
_NAMED = 3
_OTHERS = 2
"""Plans of a search that are measured in addition to the best one."""


@dataclass(frozen=True)
class Question:
    """Which tables to place, where, and how long to search; the fields are the flags of `skirl place tables`.

    `link` is None to take the rate of the costs.
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
    check: float | None = None
    before: Path | None = None
    page: Path | None = None
    quiet: bool = True
    to: TextIO | None = None
    even_rows: bool = False
    backend: Backend = OURS


def placed_tables(question: Question) -> dict[str, Any]:
    """Plan, write the plan, and return its figures with a sentence of advice.

    **Arguments**

    - `question`: flags of the command.
    """
    specs, count = read_specs(question.tables), len(question.ranks.caps)
    old = None if question.before is None else TablePlan.load(question.before)
    if old is not None:
        old.check(specs)
        if old.ranks != count:
            raise ValueError(
                f"{question.before} is for {old.ranks} ranks, and there are {count}: set --ranks {old.ranks}"
            )
    costs = costs_for(question.backend, question.costs, link=question.link or 1.0, ranks=count)
    if question.check is not None:
        check_there(question.backend)  # before the search, which may take long
        check_optimizers(question.backend, tuple(dict.fromkeys(spec.optimizer for spec in specs)))
        check_dims(question.backend, specs)
    if question.link is None:
        if costs.wire is None:
            raise ValueError(
                "the costs have no measured exchange: measure it with `skirl place costs --exchange 2"
                f"{flag_of(question.backend)}`, or set --link to a rate like 10Gbit"
            )
        costs = replace(costs, link=costs.wire.rate)
    with Progress("search", steps=None, to=question.to, quiet=question.quiet) as progress:
        _, found, problem = planned(
            specs, question.ranks, costs, columns=question.columns, rows=question.rows, seconds=question.seconds,
            seed=question.seed, others=0 if question.check is None else _OTHERS,
            even_rows=question.even_rows,
            told=lambda states, busiest: progress(states, lambda: {"busiest rank": f"{busiest:.3f} ms predicted"}),
        )  # fmt: skip
    order = canonical(specs)
    name = ROUND_ROBIN if question.before is None else str(question.before)
    before = _round_robin(problem, order) if old is None else old.placed(problem)
    measured, placed = None, found.placed
    if question.check is not None:
        measured = _checked(question, problem, found, name, before)
        placed = measured.best.placed
        sound(problem, placed)
    plan = TablePlan.of(specs, order, placed)
    if question.out is not None:
        plan.save(question.out)
    wire = costs.wire if question.link is None else None
    answer = Answer(specs, problem, plan, placed, found, name, before, measured, wire, seconds=question.seconds)
    result = answered(answer) | {"out": None if question.out is None else str(question.out), "page": None}
    if question.page is not None:
        from skirl.placement.tables.picture import drawn
        from skirl.tools.os_errors import writing

        with writing(question.page):
            question.page.parent.mkdir(parents=True, exist_ok=True)
            question.page.write_text(drawn(result, str(question.tables)).html(), encoding="utf-8", errors="replace")
        result["page"] = str(question.page)
    return result


def _checked(question: Question, problem: Problem, found: SearchResult, name: str, before: Placed) -> Checked:
    assert question.check is not None
    plans = candidates(problem, found)
    if before.score[0] == 0 and forbidden(problem, before) is None:  # it may be the best
        plans[name] = before
    with Progress("measure", steps=None, to=question.to, quiet=question.quiet) as progress:

        def told(so_far: Checked) -> None:
            best = so_far.best
            progress(len(so_far.tried), lambda: {"best": f"{best.name}, {best.busiest:.3f} ms"})

        bench = Bench(problem, question.seed, arena=arena_of(question.backend))
        return checked(problem, plans, question.check, seed=question.seed, bench=bench, told=told)


def _round_robin(problem: Problem, order: Sequence[int]) -> Placed:
    """Place whole tables, in the order of their file, on one rank after the other."""
    ranks = len(problem.ranks.caps)
    items = tuple((whole(n, spec),) for n, spec in enumerate(problem.specs))
    return problem.at(items, np.array(order, np.int64) % ranks)


def planned(
    specs: Sequence[TableSpec], ranks: Ranks, costs: Costs, *, columns: Columns = "exact", rows: bool = True,
    seconds: float = 30.0, seed: int = 0, even_rows: bool = False, forced: Sequence[str] = (), others: int = 0,
    told: Callable[[int, float], None] = lambda states, busiest: None,
) -> tuple[TablePlan, SearchResult, Problem]:  # fmt: skip
    """Return a plan within memory, what the search found, and the problem that it searched.

    Raise a ValueError if no plan fits.

    **Arguments**

    - `specs`: the tables.
    - `ranks`: the ranks to place them on.
    - `costs`: costs of parts of tables.
    - `columns`, `rows`: how tables may be cut.
    - `seconds`: time to search.
    - `seed`: the random seed.
    - `others`, `told`: as `search` takes them.
    - `even_rows`: whether rows are cut only evenly over all ranks, and no table both ways.
    - `forced`: with `even_rows`, tables that have to be cut by rows.
    """
    order = canonical(specs)
    problem = Problem([specs[n] for n in order], ranks, costs, columns, rows)
    held = [spec.nbytes(spec.rows, spec.dim) for spec in specs]
    if sum(held) > sum(ranks.caps):
        raise ValueError(_no_room(specs, held, ranks.caps))
    if (bound := next(iter(forced), None)) is not None and not rows:
        raise ValueError(f"table {bound!r} has to be cut by rows, and rows is False: leave one of the two out")
    if even_rows:
        numbers = [n for n, spec in enumerate(problem.specs) if spec.name in set(forced)]
        found = search_evenly(problem, forced=numbers, seconds=seconds, seed=seed)
    else:
        found = search(problem, seconds=seconds, seed=seed, others=others, told=told)
    sound(problem, found.placed, found.in_time)
    return TablePlan.of(specs, order, found.placed), found, problem


def sound(problem: Problem, placed: Placed, in_time: bool = True) -> None:
    """Raise if a placement exceeds a rank's memory or is forbidden by its tables, judged once more by its pieces.

    **Arguments**

    - `problem`: tables and ranks.
    - `placed`: a placement that is about to be used.
    - `in_time`: whether the search ended by itself.
    """
    over = over_caps(problem, placed)
    if max(over) > 0:
        raise ValueError(_not_found(problem, placed, over, in_time))
    if (wrong := forbidden(problem, placed)) is not None:
        raise RuntimeError(
            f"the search found a plan that is not allowed: {wrong}; this is a bug in skirl, please report it"
        )


def over_caps(problem: Problem, placed: Placed) -> list[int]:
    """Return the bytes by which each rank exceeds its memory, added up from the pieces, not as the search kept them.

    **Arguments**

    - `problem`: tables and ranks.
    - `placed`: a placement.
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
        f"{size(lacks)} too little: set --memory higher, or --ranks to {len(caps) + more}"
    )


def _not_found(problem: Problem, placed: Placed, over: Sequence[int], in_time: bool) -> str:
    worst = max(range(len(over)), key=lambda r: over[r])
    bound = [
        item
        for item, at in zip(placed.items, placed.at.tolist(), strict=True)
        if at == worst and not problem.ways(item)
    ]
    names = sorted({problem.specs[p.table].name for item in bound for p in item})[:_NAMED]
    why = f" ({', '.join(names)} may not be cut)" if names else ""
    cuts = "let tables be cut by rows, " if names or not problem.rows else ""
    more = "set --memory" if in_time else "set --seconds higher, since the search ran out of time, or --memory"
    return (
        f"found no plan that fits: rank {worst} exceeds its memory by {size(over[worst])}{why}: {cuts}{more} higher, or "
        "--ranks"
    )
