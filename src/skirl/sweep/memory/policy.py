"""What of a step is kept, made again or moved away, so that its peak fits, and whether packs run in turns or in pairs."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from skirl.sweep.memory.schedule import Figures, Schedule, in_pairs, in_turns, with_transfers
from skirl.sweep.memory.simulate import Order, Step, Timeline
from skirl.tools.units import size


class Infeasible(ValueError):
    """No plan fits; the message names the least memory that would do."""

    def __init__(self, least: int, limit: float) -> None:
        self.least = least
        super().__init__(f"a step needs {size(least)} at least, and has {size(limit, beside=least)}")


@dataclass(frozen=True)
class Choice:
    """What happens to storages of a step between forward and backward; those in neither are kept."""

    again: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()


class Plan(NamedTuple):
    schedule: Schedule
    figures: Figures
    choices: dict[Step, Choice]
    timeline: Timeline


def operators_again(step: Step, storages: Iterable[str]) -> frozenset[str] | None:
    """Return the operators that run again to make these storages from what is kept, or None if one may not."""
    again = set(storages)
    kept, found = set(step.maps) - again, set[str]()
    stack = [name for name, operator in step.operators.items() if again & set(operator.storages)]
    while stack:
        operator = step.operators[name := stack.pop()]
        if name in found or operator.backward or (operator.storages and kept.issuperset(operator.storages)):
            continue
        if operator.once:
            return None
        found.add(name)
        stack += operator.reads
    return frozenset(found)


@dataclass
class Planner:
    """Plans packs of these steps on one device."""

    steps: Sequence[Step]
    limit: float
    rate: float
    paired: bool = False

    def __post_init__(self) -> None:
        self.kinds = list(dict.fromkeys(self.steps))
        self._maps = {step: frozenset(step.maps) for step in self.kinds}
        self._orders: dict[tuple[Step, frozenset[str]], Order | None] = {}

    def order(self, step: Step, storages: frozenset[str]) -> Order | None:
        if (step, storages) not in self._orders:
            again = operators_again(step, storages)
            self._orders[step, storages] = None if again is None else step.order(again)
        return self._orders[step, storages]

    def plan(self, choices: Mapping[Step, Choice], limit: float | None = None) -> Plan | None:
        """Return the schedule of these choices, or None if an operator of them may not run again."""
        orders = [self.order(step, choices[step].again) for step in self.steps]
        found = [order for order in orders if order is not None]
        if len(found) < len(orders):
            return None
        moved = [choices[step].moved for step in self.steps]
        runs = in_pairs(self.steps, found, moved, self.rate) if self.paired else in_turns(found)
        timeline = Timeline(self.steps, runs, moved)
        schedule = with_transfers(timeline, self.limit if limit is None else limit, self.rate)
        return Plan(schedule, schedule.check(), dict(choices), timeline)

    def best(self) -> Plan:
        """Return a plan that fits: first is done what costs least of the time that other work cannot hide, and at last
        what turned out not to be needed is dropped."""
        found = [self._greedy(kinds) for kinds in (("again", "moved"), ("moved",), ("again",))]
        fitting = [plan for plan in found if plan.figures.peak <= self.limit] or [self.least()]
        if fitting[0].figures.peak > self.limit:
            raise Infeasible(fitting[0].figures.peak, self.limit)
        return min((self._improved(plan) for plan in fitting), key=self._cost)

    def least(self) -> Plan:
        """Return the plan that holds least: of what the forward leaves, only what the operator that runs takes."""
        plan = self.plan({step: Choice(moved=frozenset(step.maps)) for step in self.kinds}, limit=0)
        assert plan is not None
        return plan

    def _greedy(self, kinds: Collection[str]) -> Plan:
        plan = self.plan({step: Choice() for step in self.kinds})
        assert plan is not None
        while plan.figures.peak > self.limit and (found := [*self._candidates(plan, kinds)]):
            plan = min(found, key=lambda each: (each.figures.seconds, each.figures.peak))
        return plan

    def _candidates(self, plan: Plan, kinds: Collection[str]) -> Iterator[Plan]:
        """Yield the plans in which, of all that is idle at the peak, also that moves which is so for the longest time, and
        that is made again which frees most bytes a second."""
        timeline, starts = plan.timeline, plan.timeline.starts
        peak, idle = timeline.held.index(timeline.peak), dict[tuple[Step, str], tuple[float, int]]()
        for stay in timeline.stays:
            step = timeline.steps[stay.pack]
            choice = plan.choices[step]
            around = [place for place in stay.uses if place < peak][-1:] + [p for p in stay.uses if p > peak][:1]
            if len(around) == 2 and peak not in stay.uses and stay.storage in self._maps[step]:
                if stay.storage not in choice.again | choice.moved:
                    idle[step, stay.storage] = starts[around[1]] - starts[around[0]], stay.size
        if idle and "moved" in kinds:
            yield from self._with(plan, *max(idle, key=lambda each: idle[each]), "moved")
        rates = {each: idle[each][1] / (1e-12 + self._again(plan, *each)) for each in idle if "again" in kinds}
        if any(rates.values()):
            yield from self._with(plan, *max(rates, key=lambda each: rates[each]), "again")

    def _again(self, plan: Plan, step: Step, storage: str) -> float:
        """Return the seconds of what runs again for a storage, or infinity if it may not."""
        chosen = plan.choices[step].again
        more = operators_again(step, chosen | {storage})
        return inf if more is None else sum(step.seconds.get(name, 0.0) for name in more - (operators_again(step, chosen) or set()))

    def _with(self, plan: Plan, step: Step, storage: str, kind: str) -> Iterator[Plan]:
        choice = plan.choices[step]
        more = replace(choice, **{kind: getattr(choice, kind) | {storage}})
        if (made := self.plan({**plan.choices, step: more})) is not None:
            yield made

    def _improved(self, plan: Plan) -> Plan:
        """Drop what is not needed, and do otherwise with one storage at a time, while that saves time."""
        before = None
        while before is not plan:
            before = plan
            for step, choice in before.choices.items():
                for storage in sorted(step.maps, key=lambda name: -step.sizes[name]):
                    one = frozenset({storage})
                    kept = Choice(plan.choices[step].again - one, plan.choices[step].moved - one)
                    for other in (kept, Choice(kept.again | one, kept.moved), Choice(kept.again, kept.moved | one)):
                        made = self.plan({**plan.choices, step: other})
                        if made and made.figures.peak <= self.limit and self._cost(made) < self._cost(plan):
                            plan = made
        return plan

    def _cost(self, plan: Plan) -> tuple[float, int]:
        return plan.figures.seconds, sum(len(choice.again) + len(choice.moved) for choice in plan.choices.values())
