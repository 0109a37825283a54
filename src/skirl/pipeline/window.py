"""The window of one pass: batches that were read and not yet planned, from their ids to their Steps.

It belongs to the planner's thread. Its first batches wait until they are eight: their demand decides how the cache is split
between record widths, once, before anything is planned. After that a batch goes to the planner as it comes.
"""

from collections import deque

import numpy as np

from skirl.core.ids import distinct
from skirl.core.positions import Positions
from skirl.engine.engine import Engine
from skirl.engine.work import Micro, Work
from skirl.oracle.planner import Plan, Planner
from skirl.pipeline.epoch import Epoch

FIRST_WINDOW = 8
"""Steps whose demand decides how the cache is split."""


class Window:
    """From micro-batches to planned work.

    `enter` and `next` may raise what is wrong with a batch: an id out of range, more rows than the cache holds.
    """

    def __init__(self, engine: Engine, plan: Plan, epoch: Epoch | None) -> None:
        self.entered = 0
        self._engine = engine
        self._plan = plan
        self._epoch = epoch
        self._planner: Planner | None = None
        self._batches: deque[list[Micro]] = deque()
        self._first: list[list[Positions]] = []
        """Ids of the batches that wait for the planner to be made."""
        self._bytes = 0
        self._ended = False

    def __len__(self) -> int:
        """Batches known to the planner and not yet planned."""
        return self._planner.window if self._planner else 0

    @property
    def next_number(self) -> int:
        """The step that is planned next."""
        return self.entered - len(self._batches)

    def enter(self, micros: list[Micro]) -> None:
        """One more batch: check its ids."""
        ids = self._engine.positions([micro.captured for micro in micros])
        self._batches.append(micros)
        self.entered += 1
        if self._planner is not None:
            self._add(self._planner, micros, ids)
        else:
            self._first.append(ids)
            self._bytes += _weight(micros)
            if len(self._batches) >= self._first_window() or self._bytes >= self._plan.most_bytes:
                self._begin()

    def end(self) -> None:
        """No more batches will come."""
        self._ended = True
        if self._planner is None and self._batches:
            self._begin()
        if self._planner is not None:
            self._planner.end()

    def next(self) -> Work | None:
        """The next step, planned; None until the window is full, or when all is planned."""
        steps = self._planner.next() if self._planner is not None else None
        if steps is None:
            return None
        micros = self._batches.popleft()
        for micro in micros:  # only now: in the window keys and bags would take more than the user's ids do
            micro.ids = self._engine.resolve(micro.captured)
        return Work(steps[0].number, micros, steps)

    def executed(self, number: int) -> None:
        """Steps before `number` are done."""
        if self._planner is not None:
            self._planner.executed(number)

    def rollback(self, number: int) -> None:
        """Steps from `number` on will not be executed."""
        if self._planner is not None:
            self._planner.rollback(number)

    def _first_window(self) -> int:
        if self._engine.caches:
            return 1
        return min(FIRST_WINDOW, self._plan.depth) if isinstance(self._plan.depth, int) else FIRST_WINDOW

    def _begin(self) -> None:
        """Split the cache by the first window's demand, then plan what came so far."""
        engine, epoch = self._engine, self._epoch
        banks = range(len(engine.schema.banks))
        rows = [[distinct(ids[bank].keys()) for ids in self._first] for bank in banks]
        demand = [len(distinct(np.concatenate(rows[bank]))) for bank in banks]
        largest = [max(len(r) for r in rows[bank]) for bank in banks]
        engine.make_caches(demand, largest, in_flight=2 * self._plan.hold)
        residents = [cache.resident() for cache in engine.caches]
        firsts = None if epoch is None else [epoch.first_uses(bank, r.keys) for bank, r in enumerate(residents)]
        self._planner = Planner(
            engine.schema,
            [len(cache) for cache in engine.caches],
            self._plan,
            engine.seen,
            hold_rows=engine.staging_halves,
            residents=residents,
            resident_next=firsts,
        )
        for micros, ids in zip(self._batches, self._first, strict=True):
            self._add(self._planner, micros, ids)
        self._first.clear()

    def _add(self, planner: Planner, micros: list[Micro], ids: list[Positions]) -> None:
        next_uses = None if self._epoch is None else self._epoch.next_uses(ids)
        planner.add(ids, _weight(micros), next_uses)


def _weight(micros: list[Micro]) -> int:
    """What a batch of the window holds in memory: the user's batch, and at most 16 bytes an id in the planner."""
    return sum(micro.nbytes + 16 * len(micro.captured.values) for micro in micros)
