"""Several trainers that plan together, in lockstep in one thread; and what they should come to, in plain Python."""

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from skirl import Table
from skirl.core.placement import Placement
from skirl.core.positions import Positions
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.options import Plan
from skirl.oracle.planner import bank_planners
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from skirl.oracle.together import Joined, JointPlanner, NextUses, Together

# Three banks: dim 4 has small tables and a large one, dim 8 one whose rows need 48 bits, dim 16 one between.
TABLES = (("a", 40, 4), ("b", 50, 8), ("c", 1_000_000_000, 4), ("d", 7, 4), ("e", 1 << 48, 8), ("f", 1 << 33, 16))
SCHEMA = Schema.of([Table(name, rows, dim) for name, rows, dim in TABLES])
BANKS = [bank.tables for bank in SCHEMA.banks]

Ids = list[list[int]]
"""One trainer's keys of one batch, by bank."""
Batch = list[Ids]
"""Those of all trainers."""


def key_of(table: int, row: int) -> int:
    """Small numbers spread over a table's rows."""
    rows = TABLES[table][1]
    return table << ROW_BITS | (row if rows < 100 else row * 987_654_321_987 % rows)


def ids(most: int = 8, rows: int = 12) -> st.SearchStrategy[Ids]:
    """A trainer's ids: features may be absent, and all of them."""

    def of(bank: tuple[int, ...]) -> st.SearchStrategy[list[int]]:
        keys = st.builds(key_of, st.sampled_from(bank), st.integers(0, rows - 1))
        return st.lists(
            keys.filter(lambda key: TABLES[key >> ROW_BITS][1] > key & ((1 << ROW_BITS) - 1)), max_size=most
        )

    return st.tuples(*map(of, BANKS)).map(
        lambda parts: [sorted(part, key=lambda key: key >> ROW_BITS) for part in parts]
    )


def positions(part: Sequence[int]) -> Positions:
    return Positions.of(np.array(part, np.int64))


def asked(part: Sequence[int], owner: int, placement: Placement) -> list[int]:
    """What a trainer asks an owner for: each row once, by table, and by its last position."""
    last = {key: position for position, key in enumerate(part)}
    mine = [key for key in last if placement.site_of(np.array([key]))[0] == owner]
    return sorted(mine, key=lambda key: (key >> ROW_BITS, last[key]))


def requests(batch: Batch, owner: int, bank: int, placement: Placement) -> list[int]:
    """What all trainers ask an owner for, in rank order."""
    return [key for part in batch for key in asked(part[bank], owner, placement)]


class Trainers:
    """N trainers, each with the planners of its own rows."""

    def __init__(
        self, placement: Placement, capacities: Sequence[Sequence[int]], plan: Plan, next_uses: Sequence[NextUses] = ()
    ) -> None:
        self.joint: list[JointPlanner[int]] = []
        for rank, of in enumerate(capacities):
            together = Together([SCHEMA], rank, placement, self.no_exchange)
            banks = bank_planners(SCHEMA, of, plan, Seen(SCHEMA))
            self.joint.append(JointPlanner(together, banks, plan, next_uses[rank] if next_uses else None))
        self.words = 0
        """Sent to all, those to oneself included."""

    @staticmethod
    def no_exchange(given: list[np.ndarray]) -> list[np.ndarray]:
        raise AssertionError("here letters are carried by hand")

    def swap(self, batch: Batch | None) -> list[list[np.ndarray]]:
        """What every rank is given, by rank."""
        out = [
            joint.together.ask(None if batch is None else [positions(part) for part in batch[rank]], joint.vote())
            for rank, joint in enumerate(self.joint)
        ]
        self.words += sum(len(words) for letters in out for words in letters)
        return [list(given) for given in zip(*out, strict=True)]

    def run(
        self, batches: Sequence[Batch], nbytes: Sequence[Sequence[int]]
    ) -> Iterator[list[tuple[int, Joined, list[Step], int]]]:
        """By rank: the batch's number, its exchange, the Steps, and where the window ended."""
        for number, batch in enumerate(batches):
            for rank, (joint, given) in enumerate(zip(self.joint, self.swap(batch), strict=True)):
                joint.added(number, joint.together.answer(given), nbytes[rank][number])
            yield from self.ready()
        for joint, given in zip(self.joint, self.swap(None), strict=True):
            assert joint.together.answer(given) is None
            joint.planner.end()
        yield from self.ready()

    def ready(self) -> Iterator[list[tuple[int, Joined, list[Step], int]]]:
        """All that is planned now; every rank has planned as much."""
        while True:
            planned = [joint.next() for joint in self.joint]
            if None in planned:
                assert planned == [None] * len(planned), "some plan and others wait"
                return
            yield [
                (*of, joint.planner.end_number + joint.planner.window)
                for of, joint in zip(planned, self.joint, strict=True)
                if of is not None
            ]


def window_ends(
    batches: Sequence[Batch],
    placement: Placement,
    capacities: Sequence[Sequence[int]],
    plan: Plan,
    nbytes: Sequence[Sequence[int]],
) -> list[int]:
    """Where the window ends when each batch is planned, by the rule: rows of all owners, or bytes of any."""

    def is_full(first: int, end: int) -> bool:
        window = range(first, end)
        if not window:
            return False
        if any(sum(sizes[b] for b in window) >= plan.most_bytes for sizes in nbytes):
            return True
        if plan.ramp and len(window) >= 2 * first + 8:
            return True
        if plan.depth != "auto":
            return len(window) >= (1 if plan.depth == "epoch" else plan.depth)
        return all(
            len({key for b in window for key in requests(batches[b], owner, bank, placement)}) >= 4 * capacity
            for owner, of in enumerate(capacities)
            for bank, capacity in enumerate(of)
        )

    ends, end = [], 0
    for number in range(len(batches)):
        while end < len(batches) and not is_full(number, end):
            end += 1
        ends.append(end)
    return ends
