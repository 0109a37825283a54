"""Several trainers that plan together, in lockstep in one thread, and the expected results in plain Python."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from hypothesis import strategies as st

from skirl import Table
from skirl.core.ids import BankIds
from skirl.core.placement import Placement
from skirl.core.tables import ROW_BITS, Schema
from skirl.oracle.planner import Plan, Planner, bank_planners, due
from skirl.oracle.route import Joined, SharedRoute
from skirl.oracle.seen import Seen
from skirl.oracle.step import Step
from tests.oracle import brute

Item = TypeVar("Item")

# Three banks: dim 4 has small tables and a large one, dim 8 one whose rows need 48 bits, dim 16 one in between.
TABLES = (("a", 40, 4), ("b", 50, 8), ("c", 1_000_000_000, 4), ("d", 7, 4), ("e", 1 << 48, 8), ("f", 1 << 32, 16))
SCHEMA = Schema.of([Table(name, rows, dim) for name, rows, dim in TABLES])
BANKS = [bank.tables for bank in SCHEMA.banks]

NextUses = Callable[[int], list[np.ndarray]]
"""By bank, for each request of the next batch: the number of the next batch that uses its row."""
Ids = list[list[int]]
"""One trainer's keys in one batch, by bank."""
Batch = list[Ids]
"""The keys of all trainers in one batch."""


class Owner(Generic[Item]):
    """One of several owners that take turns planning in one thread; the caller passes messages between them."""

    def __init__(
        self, schema: Schema, rank: int, placement: Placement, capacities: Sequence[int], plan: Plan,
        next_uses: NextUses | None = None,
    ) -> None:  # fmt: skip
        self.together = SharedRoute([(schema, {})], rank, placement, _not_called)
        self.plan = plan
        self.planner: Planner[tuple[Item, Joined]] = Planner(
            bank_planners(schema, capacities, plan, Seen(schema)), plan, next_uses=next_uses
        )
        self.planner.due = 0

    def add(self, item: Item, batch: Joined, nbytes: int) -> None:
        """Add a batch after its exchange."""
        self.planner.due = due(self.plan, self.planner.window, self.planner._planned, batch.votes)
        self.planner.add((item, batch), batch.banks, nbytes)

    def next(self) -> tuple[Item, Joined, list[Step]] | None:
        """Return the next batch and its Steps, one per bank. None if it is not due yet, or if all are planned."""
        planned = self.planner.next()
        if planned is None:
            return None
        (item, batch), steps = planned
        return item, batch, steps


def _not_called(given: Sequence[np.ndarray]) -> list[np.ndarray]:
    raise AssertionError("all ranks are here: nothing is exchanged")


def key_of(table: int, row: int) -> int:
    """Return a key, with small numbers spread over a table's rows."""
    rows = TABLES[table][1]
    return table << ROW_BITS | (row % rows if rows < 100 else row * 987_654_321_987 % rows)


def random_ids(rng: np.random.Generator, most: int = 8, rows: int = 12) -> Ids:
    """Draw a trainer's ids; some features, or all, may be absent."""
    if rng.random() < 0.1:
        return [[] for _ in BANKS]
    out = []
    for bank in BANKS:
        tables = np.sort(rng.choice(bank, rng.integers(0, most + 1) if rng.random() < 0.8 else 0))
        out.append([key_of(int(table), int(rng.integers(rows))) for table in tables])
    return out


def positions(part: Sequence[int]) -> BankIds:
    return BankIds.of(np.array(part, np.int64))


def asked(part: Sequence[int], owner: int, placement: Placement) -> list[int]:
    """Return what a trainer asks an owner for: each row once, by table and then by its last position."""
    keys = brute.distinct(part)
    sites = placement.site_of(np.array(keys, np.int64)).tolist()
    return [key for key, site in zip(keys, sites, strict=True) if site == owner]


@dataclass
class Run:
    """Batches of several trainers, and caches that hold them."""

    placement: Placement
    batches: list[Batch]
    more: Sequence[int] = (0,)
    """Slots to add to what the caches need, used in turn."""
    nbytes: list[list[int]] = field(init=False)
    """By rank: the bytes of each batch."""

    def __post_init__(self) -> None:
        self.ranks = self.placement.sites
        self.asked = [
            [[self._requests(batch, owner, bank) for batch in self.batches] for bank in range(len(BANKS))]
            for owner in range(self.ranks)
        ]
        """By owner, bank and batch: what all trainers ask for, in rank order."""
        needs = [[max(1, *(len(set(keys)) for keys in of)) for of in banks] for banks in self.asked]
        self.capacities = [
            [need + self.more[(owner + bank) % len(self.more)] for bank, need in enumerate(of)]
            for owner, of in enumerate(needs)
        ]
        self.nbytes = [[len(part[rank][0]) for part in self.batches] for rank in range(self.ranks)]

    def _requests(self, batch: Batch, owner: int, bank: int) -> list[int]:
        return [key for part in batch for key in asked(part[bank], owner, self.placement)]

    def window_ends(self, plan: Plan) -> list[int]:
        """Return where the window ends when each batch is planned, by the rule: rows of all owners, or bytes of any."""
        each = zip(self.asked, self.capacities, strict=True)
        sides = [side for banks, of in each for side in zip(banks, of, strict=True)]
        return brute.window_ends(sides, self.nbytes, depth=plan.depth, ramp=plan.ramp, window_bytes=plan.most_bytes)


@st.composite
def runs(draw: st.DrawFn, most_ranks: int = 8) -> Run:
    """Draw ranks, batches, and capacities that hold them."""
    ranks, count = draw(st.integers(1, most_ranks)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows = draw(st.sampled_from([3, 12, 40]))
    placement = Placement.even(ranks)
    if draw(st.booleans()):
        placement = Placement(tuple(range(ranks, 0, -1)))
    batches = [[random_ids(rng, rows=rows) for _ in range(ranks)] for _ in range(count)]
    return Run(placement, batches, draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))


class Trainers:
    """N trainers, each with the planners of its own rows."""

    def __init__(
        self, placement: Placement, capacities: Sequence[Sequence[int]], plan: Plan, next_uses: Sequence[NextUses] = ()
    ) -> None:
        known = next_uses or [None] * len(capacities)
        self.owners: list[Owner[int]] = [
            Owner(SCHEMA, rank, placement, of, plan, known[rank]) for rank, of in enumerate(capacities)
        ]

    def swap(self, batch: Batch | None) -> list[list[np.ndarray]]:
        """Exchange requests, and return what every rank gets, by rank."""
        out = []
        for rank, owner in enumerate(self.owners):
            parts = None if batch is None else [positions(part) for part in batch[rank]]
            out.append(owner.together.ask(parts, owner.planner.vote()))
        return [list(given) for given in zip(*out, strict=True)]

    def run(
        self, batches: Sequence[Batch], nbytes: Sequence[Sequence[int]]
    ) -> Iterator[list[tuple[int, Joined, list[Step], int]]]:
        """Yield, by rank, a batch's number, its exchange, its Steps, and where the window ended."""
        for number, batch in enumerate(batches):
            for rank, (owner, given) in enumerate(zip(self.owners, self.swap(batch), strict=True)):
                joined = owner.together.answer(given)
                assert joined is not None
                owner.add(number, joined, nbytes[rank][number])
            yield from self.ready()
        for owner, given in zip(self.owners, self.swap(None), strict=True):
            assert owner.together.answer(given) is None
            owner.planner.end()
        yield from self.ready()

    def ready(self) -> Iterator[list[tuple[int, Joined, list[Step], int]]]:
        """Yield all that can be planned now; every rank has planned equally far."""
        while True:
            planned = [owner.next() for owner in self.owners]
            if None in planned:
                assert planned == [None] * len(planned), "some plan and others wait"
                return
            ends = [owner.planner._planned + owner.planner.window for owner in self.owners]
            yield [(*of, end) for of, end in zip(planned, ends, strict=True) if of is not None]
