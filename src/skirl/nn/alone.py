"""Training without a lookahead: forward plans and fetches a batch's rows, and writes those that leave the cache."""

from skirl.core.ids import Ids
from skirl.engine.capacity import CacheSplit
from skirl.engine.engine import Engine
from skirl.engine.work import Work
from skirl.oracle.bank import BatchTooLarge
from skirl.oracle.options import Plan
from skirl.oracle.planner import Planner, bank_planners
from skirl.tools.hash_index import distinct
from skirl.tools.interrupts import uninterrupted

_PLAN = Plan(depth=1, prefetch=0)
_IN_FLIGHT = 4


class StepByStep:
    """The steps of one collection without a lookahead. Successive steps share a plan until something invalidates it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planner: Planner[Ids] | None = None
        self._steps = 0

    def forget(self) -> None:
        """Drop the plan, since something else has replaced or moved rows."""
        self._planner = None

    def step(self, ids: Ids) -> Work:
        """Plan the step of one batch and bring its rows into the cache."""
        engine = self._engine
        micro = engine.resolver.resolve(engine.resolver.check(ids))
        if not engine.caches:
            engine.allocate(self._decide(micro))
            engine.capacity.by_one = True  # a lookahead will split by its window
        with uninterrupted() as hold:
            try:
                work = self._planned(micro)
                with hold.released():  # a store may hang
                    engine.fetch(work)
                leaving = engine.load(work)
                self._steps += 1
                self._begun.executed(self._steps)
                hold.most = 2  # the first Ctrl-C waits for the write, the second abandons the rows
                engine.write(leaving)
                hold.most = None
            except BaseException:
                if self._planner is not None:
                    self._planner.rollback(self._steps)  # the step did not happen
                self._planner = None
                raise
        return work

    def _planned(self, micro: Ids) -> Work:
        try:
            return self._next(micro)
        except BatchTooLarge:  # for one bank: with the cache split anew among banks it may fit
            self._begun.rollback(self._steps)
            self._planner = None
            if len(self._engine.schema.banks) == 1:
                raise self._engine.capacity.refusal([_needs(micro)], in_flight=_IN_FLIGHT, number=None) from None
            by_one = self._engine.capacity.by_one
            split = self._decide(micro)
            self._engine.drop_caches()
            self._engine.allocate(split)
            self._engine.capacity.by_one = by_one
            return self._next(micro)

    def _next(self, micro: Ids) -> Work:
        if self._planner is None:
            engine, self._steps = self._engine, 0
            residents = [cache.resident() for cache in engine.caches]
            slots = [len(cache) for cache in engine.caches]
            banks = bank_planners(engine.schema, slots, _PLAN, engine.seen, residents=residents)
            self._planner = Planner(banks, _PLAN)
            engine.forget_moves()
        self._planner.add(micro, micro.positions, 0)
        planned = self._planner.next()
        assert planned is not None
        return Work([micro], self._steps, planned[1])

    @property
    def _begun(self) -> Planner[Ids]:
        assert self._planner is not None
        return self._planner

    def _decide(self, micro: Ids) -> CacheSplit:
        needs = _needs(micro)
        return self._engine.capacity.decide([needs], needs, in_flight=_IN_FLIGHT, number=None)


def _needs(micro: Ids) -> list[int]:
    """Return the number of distinct rows of each bank."""
    return [len(distinct(ids.keys)[0]) for ids in micro.banks]
