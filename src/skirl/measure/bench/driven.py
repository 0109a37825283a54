"""The planning of several trainers, run in one process without rows: who asks whom for what, what the loop waits for.

The production code does all the planning and writing. Owners may be sampled: each plans what all trainers ask of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import Schema
from skirl.oracle.halves import Asking, Reads, critical_gradients, critical_values
from skirl.oracle.options import Plan, Vote
from skirl.oracle.planner import Planner, bank_planners
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from skirl.oracle.together import BATCH, Joined, Letter, Letters, Together

Item = TypeVar("Item")


@dataclass(slots=True)
class Half:
    """An owner's half of a step, and which of its requests are critical given the steps before and after."""

    step: Step
    serve: np.ndarray
    """int32 [trainers + 1]: where each trainer's requests begin."""
    ids: np.ndarray
    """int32 [requests]: how many ids each stands for."""
    values: np.ndarray
    """bool [requests]: whether the step before changed the row, so that its value is critical."""
    gradients: np.ndarray
    """bool [requests]: whether the next step uses the row, or its owner evicts it by then: its gradient is critical."""


class Timed:
    """CPU time of one rank's work, by task. Counts only while `counts` is true."""

    def __init__(self) -> None:
        self.counts = False
        self.ms: dict[str, float] = {}

    def __call__(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call, add the CPU time to `what`, and return the result."""
        began = time.thread_time()
        out = call(*args)
        if self.counts:
            self.ms[what] = self.ms.get(what, 0.0) + (time.thread_time() - began) * 1e3
        return out


def critical(before: Step | None, step: Step, after: Step | None, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each request, whether the loop waits for its value, and whether it waits for its gradient.

    **Arguments**

    - `before`, `step`, `after`: consecutive steps of one owner; None if there is none.
    - `capacity`: the owner's slots.
    """
    none = np.zeros(len(step.slots), np.bool_)
    return (
        none if before is None else critical_values(before, step, capacity),
        none if after is None else critical_gradients(step, after, capacity),
    )


class Owner(Generic[Item]):
    """One of several owners that take turns planning in one thread; the caller passes messages between them.

    **Arguments**

    - `schema`, `capacities`: the tables, and the slots of each bank.
    - `rank`, `placement`: this owner's rank, and who owns which rows.
    - `plan`: how far to read ahead.
    """

    def __init__(self, schema: Schema, rank: int, placement: Placement, capacities: Sequence[int], plan: Plan) -> None:
        self.together = Together([schema], rank, placement, _not_called)
        self._plan = plan
        self._planner: Planner[tuple[Item, Joined]] = Planner(
            bank_planners(schema, capacities, plan, Seen(schema), share=self.together.share), plan
        )
        self._planner.due = 0

    def vote(self) -> Vote:
        """Return its vote on the window, which travels with the next batch."""
        return self._planner.vote()

    def add(self, item: Item, batch: Joined, nbytes: int, next_uses: list[np.ndarray] | None = None) -> None:
        """Add a batch after its exchange. The other arguments are those of `Planner.add`."""
        self.together.decide(self._plan, batch)
        self._planner.due = self.together.due
        self._planner.add((item, batch), batch.banks, nbytes, next_uses)

    def end(self) -> None:
        """Say that no more batches will come."""
        self._planner.end()

    def next(self) -> tuple[Item, Joined, list[Step]] | None:
        """Return the next batch and its Steps, one per bank. None if it is not due yet, or if all are planned."""
        planned = self._planner.next()
        if planned is None:
            return None
        self.together.step_planned()
        (item, batch), steps = planned
        return item, batch, steps

    def executed(self, number: int) -> None:
        """Say that the steps before `number` are done."""
        self._planner.executed(number)


class Driven:
    """All trainers of a job, which take turns in this thread.

    **Arguments**

    - `schema`: tables of one dim.
    - `ranks`: the number of trainers.
    - `capacity`: slots of each trainer.
    - `plan`: how far to read ahead.
    - `owners`: the trainers that plan; None for all. The others only ask.
    """

    def __init__(
        self, schema: Schema, ranks: int, capacity: int, plan: Plan, owners: Sequence[int] | None = None
    ) -> None:
        self.ranks, self.capacity = ranks, capacity
        self.owners = tuple(range(ranks)) if owners is None else tuple(owners)
        self.timed = {owner: Timed() for owner in self.owners}
        """CPU time of each owner's planning."""
        self.words = 0
        """Number of int32 words that the owners wrote to other trainers."""
        placement = Placement.even(ranks)
        self._planners: dict[int, Owner[tuple[Joined, np.ndarray]]] = {
            owner: Owner(schema, owner, placement, [capacity], plan) for owner in self.owners
        }
        self._asking, self._letters = Asking(schema, 0, placement), Letters([(schema, 0)])
        self._number = 0

    def steps(self, batches: Iterable[Sequence[Positions]]) -> Iterator[list[Half]]:
        """Yield the halves of all owners for each step, as soon as the step after it is planned.

        **Arguments**

        - `batches`: each a list of every trainer's ids.
        """
        near: list[list[tuple[Joined, np.ndarray, Step]]] = []
        for batch in batches:
            self._enter(batch)
            for planned in self._planned():
                near.append(planned)
                if len(near) > 1:
                    yield self._halves(near)
        for planner in self._planners.values():
            planner.end()
        for planned in self._planned():
            near.append(planned)
            if len(near) > 1:
                yield self._halves(near)
        if near:
            yield self._halves(near, last=True)

    def _halves(self, near: list[list[tuple[Joined, np.ndarray, Step]]], last: bool = False) -> list[Half]:
        """Return the halves of the last step but one, or of the last. Drop the steps that are no longer needed."""
        at = len(near) - 1 if last else len(near) - 2
        before = near[at - 1] if at else None
        after = None if last else near[at + 1]
        out = []
        for n, (joined, ids, step) in enumerate(near[at]):
            neighbours = [None if side is None else side[n][2] for side in (before, after)]
            out.append(Half(step, joined.serve[0], ids, *critical(neighbours[0], step, neighbours[1], self.capacity)))
        del near[: at if not last else 0]
        return out

    def _enter(self, batch: Sequence[Positions]) -> None:
        letters: dict[int, list[np.ndarray]] = {owner: [] for owner in self.owners}
        reads: dict[int, Reads] = {}
        for rank, part in enumerate(batch):
            if rank in self._planners:
                planner, timed = self._planners[rank], self.timed[rank]
                written = timed("ask", planner.together.ask, [part], timed("vote", planner.vote))
                self.words += sum(len(words) for to, words in enumerate(written) if to != rank)
                for owner, given in letters.items():
                    given.append(written[owner])
            else:
                reads[rank], asked = self._asking.of(part)
                for owner, given in letters.items():
                    letter = Letter(BATCH, self._number, Vote(0, 0), [asked[owner]])
                    given.append(self._letters.write(letter))
        joined: dict[int, Joined] = {
            owner: self.timed[owner]("join", self._planners[owner].together.answer, given)
            for owner, given in letters.items()
        }
        reads |= {owner: answer.reads[0] for owner, answer in joined.items()}
        for owner, answer in joined.items():
            ids = [
                np.diff(reads[r].group_start[reads[r].ask[owner] : reads[r].ask[owner + 1] + 1]) for r in sorted(reads)
            ]
            self.timed[owner]("add", self._planners[owner].add, (answer, np.concatenate(ids)), answer, 0)
        self._number += 1

    def _planned(self) -> Iterator[list[tuple[Joined, np.ndarray, Step]]]:
        """Yield the steps that can be planned now, the same ones for all owners."""
        while True:
            found = []
            for owner, planner in self._planners.items():
                planned = self.timed[owner]("plan", planner.next)
                if planned is not None:
                    (joined, ids), _, (step,) = planned
                    planner.executed(step.number)
                    found.append((joined, ids, step))
            if not found:
                return
            assert len(found) == len(self.owners), "owners plan different steps"
            yield found


def _not_called(given: Sequence[np.ndarray]) -> list[np.ndarray]:
    raise AssertionError("all ranks are here: nothing is exchanged")
