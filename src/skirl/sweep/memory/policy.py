"""What of a step is kept, made again or moved away, so that its peak fits, and whether packs run in turns or in pairs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from skirl.sweep.memory.schedule import Figures, Schedule, in_pairs, in_turns, with_transfers
from skirl.sweep.memory.simulate import Order, Step, Timeline
from skirl.tools.units import size

ENOUGH = 1.01
"""A plan is not improved further if it takes no more than this of the time that its operators take once."""


class Infeasible(ValueError):
    def __init__(self, least: int, limit: float, what: str = "a step needs") -> None:
        self.least = least
        super().__init__(
            f"{what} {size(least)} ({least:,} bytes) at least, and memory is {size(limit, beside=least)}: set memory to "
            "that, or train fewer variants"
        )


@dataclass(frozen=True)
class Choice:
    """What happens to storages of a step between its forward and its backward; those in neither are kept."""

    again: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    def but(self, storage: str) -> "Iterable[Choice]":
        """Yield what is chosen with this storage kept, moved and made again."""
        one = frozenset({storage})
        again, moved = self.again - one, self.moved - one
        yield from (Choice(again, moved), Choice(again, moved | one), Choice(again | one, moved))


class Plan(NamedTuple):
    schedule: Schedule
    figures: Figures
    choices: Mapping[Step, Choice]
    timeline: Timeline

    @property
    def cost(self) -> tuple[float, int]:
        """Its time, and how many storages do not stay."""
        return self.figures.seconds, sum(len(each.again) + len(each.moved) for each in self.choices.values())


@lru_cache(maxsize=4096)
def operators_again(step: Step, choice: Choice) -> frozenset[str] | None:
    """Return the operators that run again for a choice, from what is kept or was moved, or None if one may not."""
    stack, found = [name for storage in choice.again for name in step.aliases[storage]], set[str]()
    kept = set(step.maps) - choice.again
    while stack:
        operator = step.operators[name := stack.pop()]
        if name in found or operator.backward or kept.issuperset(operator.storages):
            continue
        if operator.once or choice.moved.intersection(operator.makes):
            return None
        found.add(name)
        beside = kept.intersection(operator.makes)  # it makes them all
        kept -= beside
        stack += [*operator.reads, *(other for storage in beside for other in step.aliases[storage])]
    return frozenset(found)


@lru_cache(maxsize=4096)
def order_of(step: Step, choice: Choice) -> Order | None:
    again = operators_again(step, choice)
    return None if again is None else step.order(again)


@dataclass(frozen=True)
class Planner:
    """Plans packs of these steps on one device, whose link has a rate in bytes a second."""

    steps: Sequence[Step]
    limit: float
    rate: float
    paired: bool = False

    def plan(self, choices: Mapping[Step, Choice], limit: float | None = None) -> Plan | None:
        """Return the schedule of these choices, or None if what they make again may not be."""
        orders = [order for step in self.steps if (order := order_of(step, choices[step])) is not None]
        if len(orders) < len(self.steps):
            return None
        moved = [choices[step].moved for step in self.steps]
        runs = in_pairs(self.steps, orders, moved, self.rate) if self.paired else in_turns(orders)
        timeline = Timeline(self.steps, runs, moved)
        schedule = with_transfers(timeline, self.limit if limit is None else limit, self.rate)
        return Plan(schedule, schedule.check(), choices, timeline)

    def least(self) -> Plan:
        """Return the plan that holds least: of what the forward leaves, only what the operator that runs takes."""
        plan = self.plan({step: Choice(moved=frozenset(step.maps)) for step in self.steps}, limit=0)
        assert plan is not None
        return plan

    def best(self) -> Plan:
        """Return a plan that fits: first is done what costs least of the time that other work cannot hide; then one storage
        after the other is kept or treated otherwise, if that saves time. Raise Infeasible if none fits."""
        plan = self.plan({step: Choice() for step in self.steps})
        while plan is not None and plan.figures.peak > self.limit:
            plan = min(self._candidates(plan), key=lambda each: each.figures[1::-1], default=None)
        if (least := self.least()).figures.peak > self.limit:
            raise Infeasible(least.figures.peak, self.limit)
        found = [each for each in (plan, self.plan(least.choices)) if each and each.figures.peak <= self.limit]
        return min(map(self._improved, found or [least]), key=lambda each: each.cost)

    def _candidates(self, plan: Plan) -> Iterable[Plan]:
        """Yield the plans in which, of all that is idle at the peak, also that moves which is so for the longest time, or
        that is made again which frees most bytes a second."""
        timeline, starts = plan.timeline, plan.timeline.starts
        peak, idle, rates = timeline.held.index(max(timeline.held)), dict[tuple[Step, str], float](), {}
        for stay in timeline.stays:
            step, storage = timeline.steps[stay.pack], stay.storage
            before, behind = [use for use in stay.uses if use <= peak], [use for use in stay.uses if use >= peak]
            chosen = storage in plan.choices[step].again | plan.choices[step].moved
            if before and behind and before[-1] < peak < behind[0] and storage in step.maps and not chosen:
                idle[step, storage] = starts[behind[0]] - starts[before[-1]]
                again = operators_again(step, Choice(again=frozenset({storage})))
                cost = inf if again is None else sum(step.seconds.get(name, 0.0) for name in again)
                rates[step, storage] = stay.size / (cost + 1e-12)
        for way, values in enumerate((idle, rates)) if idle else ():
            step, storage = max(values, key=values.__getitem__)
            other = [*plan.choices[step].but(storage)][1 + way]
            if (made := self.plan({**plan.choices, step: other})) is not None:
                yield made

    def _improved(self, plan: Plan) -> Plan:
        enough = ENOUGH * sum(sum(step.seconds.values()) for step in self.steps)
        for kind, storage in [(each, storage) for each in plan.choices for storage in each.maps]:
            own = plan.choices[kind]
            if storage in own.again | own.moved or plan.figures.seconds > enough:
                made = [self.plan({**plan.choices, kind: each}) for each in own.but(storage) if each != own]
                fits = [each for each in made if each is not None and each.figures.peak <= self.limit]
                plan = min([plan, *fits], key=lambda each: each.cost)
        return plan


def fastest(steps: Sequence[Step], limit: float, rate: float) -> Plan:
    """Return the plan of packs in turns, or in pairs if that fits and is faster."""
    choices = {step: Planner([step], limit, rate).best().choices[step] for step in dict.fromkeys(steps)}
    plan = Planner(steps, limit, rate).plan(choices)
    assert plan is not None
    if len(steps) > 1 and plan.figures.seconds > sum(sum(step.seconds.values()) for step in steps):
        with suppress(Infeasible):
            few = Planner(steps[:3] if len(choices) == 1 else steps, limit, rate, paired=True).best()  # three alike do
            pairs = Planner(steps, limit, rate, paired=True).plan(few.choices)
            if pairs is not None and pairs.figures.peak <= limit:
                return min(plan, pairs, key=lambda each: each.figures.seconds)
    return plan
