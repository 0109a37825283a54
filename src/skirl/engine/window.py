"""The window of one pass: batches that were read and not planned yet, from their ids to their Steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from skirl.core.ids import BadIds, BankIds, Ids
from skirl.core.placement import sites_of
from skirl.engine.capacity import CacheSplit, DoesNotFit
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.oracle.bank import BankPlanner, Resident
from skirl.oracle.epoch import Epoch
from skirl.oracle.planner import Plan, Planner, bank_planners, due
from skirl.oracle.route import Route
from skirl.tools.hash_index import distinct

FIRST_WINDOW = 8
"""Steps whose demand decides how the caches are split."""


class Window:
    """Turns micro-batches into planned steps, in the planner's thread. `enter` and `next` raise what is wrong with a
    batch: an id out of range, or more rows than the cache holds. If it is only the split of the cache that a batch does
    not fit, the window is `stopped` once all before it is planned."""

    def __init__(
        self,
        engines: Sequence[Engine],
        plan: Plan,
        epoch: Epoch | None = None,
        shards: int = 1,
        route: Route | None = None,
        mine: range = range(1),
    ) -> None:
        self.entered = 0
        self.next_number = 0
        self.over = False
        self._engines = engines
        self._plan = plan
        self._epoch = epoch
        self._shards, self._mine = shards, mine
        self._wanted = 1 if all(engine.caches for engine in engines) else self._first_window
        """Number of batches that the planner needs to begin."""
        ends = np.cumsum([len(engine.schema.banks) for engine in engines])
        self._banks = [slice(end - len(e.schema.banks), end) for e, end in zip(engines, ends, strict=True)]
        """For each engine, which of all banks are its own."""
        self._route = route or Route()
        self._due: int | None = None
        """Steps that all trainers plan before the last batch to come enters. None: the planner decides for itself."""
        self._planner = self._new_planner()

    def _new_planner(self) -> Planner[list[Work]]:
        next_uses = None if self._epoch is None else self._epoch.next_uses
        return Planner([], self._plan, next_uses=next_uses, check_fits=self._check_fits)

    def __len__(self) -> int:
        """Return the number of batches that the planner knows and has not planned yet."""
        return self._planner.window

    def enter(self, batches: list[Ids]) -> None:
        """Check the ids of one more step's micro-batches, and let them enter."""
        if self._route.ended:
            return
        try:
            works = [
                Work([engine.resolver.check(ids) for ids in batches], shards=self._shards, mine=self._mine)
                for engine in self._engines
            ]
        except BadIds as error:
            self._route.fail(BadIds(f"batch {self.entered}, {error}"))
        banks = [BankIds.joined(parts) for work in works for parts in zip(*(micro.banks for micro in work.micros))]
        micros = [work.micros for e, work in zip(self._engines, works) for _ in e.schema.banks]
        joined = self._route.batch(banks, self._planner.vote(), micros)
        if joined is None:
            self._over()
            return
        if joined.votes:
            self._due = due(self._plan, self.entered - self.next_number, self.next_number, joined.votes)
        for work, part in zip(works, self._banks, strict=True):
            work.asked, work.reads, work.serve = joined.banks[part], joined.reads[part], joined.serve[part]
            for bank, of_all in enumerate(joined.whole[part]):
                if of_all:
                    work.whole[bank] = Work(of_all, shards=self._shards, mine=range(self._shards))
        self.entered += 1
        with self._told():
            self._take(works)

    def _take(self, works: list[Work]) -> None:
        """Give a batch to the planner, and let that begin once it has enough of them."""
        planner = self._planner
        if self._due and not planner.banks:
            self._begin()
        self._add(works)
        if not planner.banks and (
            len(planner.rest) >= self._wanted or sum(map(nbytes_of, planner.rest)) >= self._plan.most_bytes
        ):
            self._begin()

    def _add(self, works: list[Work]) -> None:
        self._planner.add(works, [part for work in works for part in work.asked], nbytes_of(works))

    def end(self) -> None:
        self._route.end(self._planner.vote())
        self._over()

    def leave(self) -> None:
        """Tell other trainers that the loop has ended before the data: they may be waiting for this one's next batch."""
        if self._route.failure is None:
            self._route.end(self._planner.vote())

    def _over(self) -> None:
        self.over, self._wanted = True, 1
        if self._planner.rest and not self._planner.banks:
            self._begin()
        self._planner.end()

    @property
    def stopped(self) -> bool:
        """True if all is planned before a batch that the caches hold only if they are split anew: see `begin_anew`."""
        return self._planner.stopped and not self._planner.window

    def begin_anew(self) -> None:
        """Begin at the first batch that is not planned. All before must be executed, and its engines without caches."""
        self._planner.rollback(self.next_number)
        rest = self._planner.unplanned
        self._planner, self._wanted = self._new_planner(), 1 if self.over else self._first_window
        for works in rest[:-1]:
            self._add(works)
        with self._told():
            for last in rest[-1:]:
                self._take(last)
        if self.over:
            self._planner.end()

    def next(self) -> list[Work] | None:
        """Plan the next step and return it, by collection; None until the window is full, when it stops, or if all is
        planned."""
        if self._route.failure is not None:
            return None
        self._planner.due, planned = self._due, None
        with self._told():
            planned = self._planner.next()
        if planned is None:
            return None
        if self._due:
            self._due -= 1
        works, steps = planned
        for engine, work, part in zip(self._engines, works, self._banks, strict=True):
            for micro in work.micros:  # only now: in the window, bags would take more memory than the user's ids
                for bank in range(len(micro.banks)):
                    engine.resolver.resolve_bank(micro, bank, not work.reads or work.reads[bank] is not None)
            work.asked, work.number, work.steps = (), self.next_number, steps[part]
            for bank, whole in work.whole.items():
                for micro in whole.micros:
                    engine.resolver.resolve_bank(micro, bank)
                whole.number, whole.steps = work.number, work.steps
        self.next_number += 1
        return works

    def executed(self, number: int) -> None:
        self._planner.executed(number)

    def rollback(self, number: int) -> None:
        self._planner.rollback(number)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """With several trainers, let the next exchange tell all of them what goes wrong in this block, and raise it then."""
        try:
            yield
        except DoesNotFit as error:
            self._route.tell(error)

    @property
    def _first_window(self) -> int:
        """Number of batches that decide how the caches are split."""
        return min(FIRST_WINDOW, self._plan.depth) if isinstance(self._plan.depth, int) else FIRST_WINDOW

    def _begin(self) -> None:
        banks: list[BankPlanner] = []
        for i, engine in enumerate(self._engines):
            if not engine.caches:
                engine.allocate(self._split(i))
            split = engine.capacity.split
            assert split is not None
            banks += bank_planners(
                engine.schema,
                split.slots,
                self._plan,
                engine.seen,
                hold_rows=engine.capacity.halves,
                residents=self._residents(i),
                first=self.next_number,
            )
        owners = [(e.rows, e.rows.whole.get(bank.tables[0])) for e in self._engines for bank in e.schema.banks]
        elsewhere = {i for i, (rows, of) in enumerate(owners) if of is not None and rows.peers.rank not in sites_of(of)}
        self._planner.begin(banks, elsewhere)
        if self._due:  # the batches so far were in the window before: they enter before any is planned
            self._planner.due = 0
            self._planner.next()

    def _split(self, i: int) -> CacheSplit:
        """Return how the cache of an engine is split for the first batches."""
        rest = self._planner.rest[: self._first_window]
        rows = [[distinct(part.keys())[0] for part in works[i].asked] for works in rest]
        return self._engines[i].capacity.decide(
            [[len(part) for part in parts] for parts in rows],
            [len(distinct(np.concatenate(parts))[0]) for parts in zip(*rows)],
            in_flight=2 * self._plan.hold,
            number=self.next_number,
        )

    def _check_fits(self, bank: int, number: int) -> None:
        """Raise if its engine's cache cannot hold a batch, however it is split."""
        i = next(i for i, banks in enumerate(self._banks) if bank < banks.stop)
        needs = [[len(distinct(part.keys())[0]) for part in works[i].asked] for works in self._planner.rest]
        self._engines[i].capacity.decide(needs, needs[0], in_flight=2 * self._plan.hold, number=number)

    def _residents(self, i: int) -> list[Resident]:
        """Return the rows in an engine's caches, with the first batch that uses each, if the epoch is known."""
        residents = [cache.resident() for cache in self._engines[i].caches]
        for bank, of in enumerate(residents, self._banks[i].start):
            if self._epoch is not None and len(of.keys):
                of.next_uses = self._epoch.first_uses(bank, of.keys)
        return residents


def nbytes_of(works: list[Work]) -> int:
    """Return the memory of a batch in the window: the user's batch, and at most 16 bytes per id in the planner."""
    asked = sum(part.count for work in works for part in work.asked)
    return sum(ids.nbytes for ids in works[0].micros) + 16 * asked
