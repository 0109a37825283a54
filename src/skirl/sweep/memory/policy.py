"""What of a step is kept, made again or moved away, so that its peak fits, and whether packs run in turns or in pairs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from skirl.sweep.memory.schedule import Figures, Schedule, in_pairs, in_turns, with_transfers
from skirl.sweep.memory.simulate import Order, Step, Timeline
from skirl.tools.units import size


class Infeasible(ValueError):
    """No plan fits; the message names the least memory that would do."""

    def __init__(self, least: int, limit: float, what: str = "a step needs") -> None:
        self.least = least
        super().__init__(
            f"{what} {size(least)} ({least:,} bytes) at least, and the limit is {size(limit, beside=least)}"
        )


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


def operators_again(step: Step, choice: Choice) -> frozenset[str] | None:
    """Return the operators that run again for a choice, from what is kept or was moved, or None if one may not."""
    again, found = set(choice.again), set[str]()
    stack = [name for storage in again for name in step.aliases[storage]]
    kept = set(step.maps) - again
    while stack:
        operator = step.operators[name := stack.pop()]
        if name in found or operator.backward or kept.issuperset(operator.storages):
            continue
        if operator.once or choice.moved.intersection(operator.makes):
            return None
        found.add(name)
        stack += operator.reads
        if beside := kept.intersection(operator.makes):  # it makes them all
            kept -= beside
            stack += [other for storage in beside for other in step.aliases[storage]]
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
        self._orders: dict[tuple[Step, Choice], Order | None] = {}

    def order(self, step: Step, choice: Choice) -> Order | None:
        if (step, choice) not in self._orders:
            again = operators_again(step, choice)
            self._orders[step, choice] = None if again is None else step.order(again)
        return self._orders[step, choice]

    def plan(self, choices: Mapping[Step, Choice], limit: float | None = None) -> Plan | None:
        """Return the schedule of these choices, or None if an operator of them may not run again."""
        orders = [self.order(step, choices[step]) for step in self.steps]
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
        return self._improved(min(fitting, key=self._cost))

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
            is_idle = len(around) == 2 and peak not in stay.uses and stay.storage in self._maps[step]
            if is_idle and stay.storage not in choice.again | choice.moved:
                idle[step, stay.storage] = starts[around[1]] - starts[around[0]], stay.size
        if idle and "moved" in kinds:
            yield from self._with(plan, *max(idle, key=lambda each: idle[each]), "moved")
        rates = {each: idle[each][1] / (1e-12 + self._again(plan, *each)) for each in idle if "again" in kinds}
        if any(rates.values()):
            yield from self._with(plan, *max(rates, key=lambda each: rates[each]), "again")

    def _again(self, plan: Plan, step: Step, storage: str) -> float:
        """Return the seconds of what runs again for a storage, or infinity if it may not."""
        choice = plan.choices[step]
        now = operators_again(step, choice)
        more = operators_again(step, replace(choice, again=choice.again | {storage}))
        return inf if more is None else sum(step.seconds.get(name, 0.0) for name in more - (now or set()))

    def _with(self, plan: Plan, step: Step, storage: str, kind: str) -> Iterator[Plan]:
        choice = plan.choices[step]
        more = replace(choice, **{kind: getattr(choice, kind) | {storage}})
        if (made := self.plan({**plan.choices, step: more})) is not None:
            yield made

    def _improved(self, plan: Plan) -> Plan:
        """Drop what is not needed, and do otherwise with one storage at a time, while more than 1% of the time is lost."""
        enough = 1.01 * sum(sum(step.seconds.values()) for step in self.steps)
        before = None
        while before is not plan:
            before = plan
            for step, choice in before.choices.items():
                for storage in sorted(step.maps, key=step.sizes.__getitem__, reverse=True):
                    one, own = frozenset({storage}), plan.choices[step]
                    if plan.figures.seconds <= enough and storage not in choice.again | choice.moved:
                        continue
                    kept = Choice(own.again - one, own.moved - one)
                    for other in (kept, Choice(kept.again | one, kept.moved), Choice(kept.again, kept.moved | one)):
                        made = None if other == own else self.plan({**plan.choices, step: other})
                        if made and made.figures.peak <= self.limit and self._cost(made) < self._cost(plan):
                            plan = made
            if plan.figures.seconds <= enough:
                break
        return plan

    def _cost(self, plan: Plan) -> tuple[float, int]:
        return plan.figures.seconds, sum(len(choice.again) + len(choice.moved) for choice in plan.choices.values())


def fastest(steps: Sequence[Step], limit: float, rate: float) -> Plan:
    """Return the plan of packs in turns, or in pairs if that fits and is faster."""
    choices = {step: Planner([step], limit, rate).best().choices[step] for step in dict.fromkeys(steps)}
    plan = Planner(steps, limit, rate).plan(choices)
    assert plan is not None
    lost = plan.figures.seconds - sum(sum(step.seconds.values()) for step in steps)
    if len(steps) > 1 and lost > 0:
        alike = len(choices) == 1  # then three stand for all
        with suppress(Infeasible):
            few = Planner(steps[:3] if alike else steps, limit, rate, paired=True).best()
            pairs = Planner(steps, limit, rate, paired=True).plan(few.choices)
            if pairs and pairs.figures.peak <= limit and pairs.figures.seconds < plan.figures.seconds:
                return pairs
    return plan
