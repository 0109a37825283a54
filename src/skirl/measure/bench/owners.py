"""Planning divided over N owners that each plan their own rows, compared with one planner of all over the same batches.

All ranks take turns in one process. Messages between them are written and read as in production.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.measure.bench.driven import Owner, Timed
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner, bank_planners
from skirl.oracle.seen import Seen
from skirl.oracle.together import Joined


def parts_of(batch: Positions, ranks: int) -> list[Positions]:
    """Split a batch's ids by rank: each part into equal contiguous stretches.

    >>> import numpy as np
    >>> [part.keys().tolist() for part in parts_of(Positions.of(np.array([7, 8, 9, 1 << 48])), 2)]
    [[7], [8, 9, 281474976710656]]
    """
    begin, length = batch.parts[:, 1], batch.parts[:, 2] - batch.parts[:, 1]
    out = []
    for rank in range(ranks):
        mine = batch.parts.copy()
        mine[:, 1] = begin + length * rank // ranks
        mine[:, 2] = begin + length * (rank + 1) // ranks
        out.append(Positions(batch.values, mine))
    return out


def divided(
    schema: Schema, batches: Iterable[Positions], *, ranks: int, capacity: int, plan: Plan, warm: int
) -> dict[str, Any]:
    """Plan all batches both ways. Return what each moved, the CPU time that it took, and the ratios.

    **Arguments**

    - `schema`, `batches`: tables of one dim, and the ids.
    - `ranks`: the number of owners; each has an equal part of the capacity.
    - `capacity`: slots of the one planner of all.
    - `plan`: how far to read ahead.
    - `warm`: the first batch whose time counts.
    """
    one: Planner[None] = Planner(bank_planners(schema, [capacity], plan, Seen(schema)), plan)
    placement, each_has = Placement.even(ranks), [max(1, capacity // ranks)]
    owners: list[Owner[None]] = [Owner(schema, rank, placement, each_has, plan) for rank in range(ranks)]
    alone, each = Timed(), [Timed() for _ in owners]
    moved = {"one": 0, "owners": 0}
    steps = rows = words = count = 0

    def planned(number: int) -> None:
        for step in _all(lambda: alone("plan", one.next)):
            moved["one"] += step[1][0].fetches
            one.executed(step[1][0].number)
        for timed, owner in zip(each, owners, strict=True):
            for _, _, (step,) in _all(lambda timed=timed, owner=owner: timed("plan", owner.next)):
                moved["owners"] += step.fetches
                owner.executed(step.number)

    for number, batch in enumerate(batches):
        for timed in (alone, *each):
            timed.counts = number >= warm
        steps += number >= warm
        one.add(None, [batch], 0)
        out = [
            timed("ask", owner.together.ask, [part], timed("vote", owner.vote))
            for timed, owner, part in zip(each, owners, parts_of(batch, ranks), strict=True)
        ]
        for timed, owner, given in zip(each, owners, zip(*out, strict=True), strict=True):
            answer: Joined = timed("join", owner.together.answer, given)
            rows += int(answer.reads[0].ask[-1])
            timed("add", owner.add, None, answer, 0)
        words += sum(len(letter) for letters in out for letter in letters)
        planned(number)
        count += 1
    for timed in (alone, *each):
        timed.counts = False
    one.end()
    for owner in owners:
        owner.end()
    planned(count)
    busiest = max(each, key=lambda timed: sum(timed.ms.values()))
    all_ms, one_ms = sum(busiest.ms.values()), sum(alone.ms.values())
    return {
        "batches": count,
        "fetched": moved,
        "fetches_vs_one": round(moved["owners"] / moved["one"], 4) if moved["one"] else None,
        "cpu_ms": {"one": one_ms / max(1, steps), **{name: ms / max(1, steps) for name, ms in busiest.ms.items()}},
        "cpu_vs_one": round(all_ms / one_ms, 4) if one_ms else None,
        "rows_a_trainer": rows / count / ranks,
        "id_bytes_a_row": round(4 * words / rows, 3),
    }


def _all(call: Callable[[], Any]) -> Iterator[Any]:
    return iter(call, None)
