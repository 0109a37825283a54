"""What of a step is kept, made again or moved away, so that its peak fits, and whether packs run in turns or in pairs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from skirl.sweep.memory.schedule import Figures, Order, Schedule, Step, in_pairs, in_turns, with_transfers
from skirl.tools.units import size


class Infeasible(ValueError):
    def __init__(self, least: int, limit: float) -> None:
        self.least, self.limit = least, limit
        super().__init__(
            f"in turns, variants need {size(least)} ({least:,} bytes) at least, and memory is {size(limit)}: set memory to "
            f"{least}B or more, or train fewer variants"
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
def order_of(step: Step, choice: Choice) -> Order:
    again = operators_again(step, choice)
    assert again is not None
    return step.order(again)


@dataclass(frozen=True)
class Planner:
    """Plans packs of these steps on one device, whose link has a rate in bytes a second."""

    steps: Sequence[Step]
    limit: float
    rate: float
    paired: bool = False

    def plan(self, choices: Mapping[Step, Choice]) -> Plan:
        orders = [order_of(step, choices[step]) for step in self.steps]
        runs = in_pairs(orders) if self.paired else in_turns(orders)
        moved = [choices[step].moved for step in self.steps]
        schedule = with_transfers(self.steps, runs, moved, self.limit, self.rate)
        return Plan(schedule, schedule.check(), choices)

    def least(self) -> Plan:
        """Return the plan that holds least: of what the forward leaves, only what the operator that runs takes."""
        return replace(self, limit=0).plan({step: Choice(moved=frozenset(step.maps)) for step in self.steps})

    def best(self) -> Plan:
        """Return the plan that holds least, in which one storage after the other is kept or treated otherwise, if that
        saves time and fits: the largest first, or the smallest, whichever ends better."""
        everything = self.plan({step: Choice() for step in self.steps})
        if everything.figures.peak <= self.limit:
            return everything
        storages = [(step, storage) for step in dict.fromkeys(self.steps) for storage in step.maps]
        return min(map(self._improved, (storages, storages[::-1])), key=lambda each: each.cost)

    def _improved(self, storages: Sequence[tuple[Step, str]]) -> Plan:
        plan = self.least()
        for step, storage in [*storages, *storages]:
            own = plan.choices[step]
            others = [each for each in own.but(storage) if each != own and operators_again(step, each) is not None]
            made = [self.plan({**plan.choices, step: each}) for each in others]
            plan = min([plan, *(each for each in made if each.figures.peak <= self.limit)], key=lambda each: each.cost)
        return plan


def fastest(steps: Sequence[Step], limit: float, rate: float) -> Plan:
    """Return the plan of packs in turns, each of which fits, or in pairs if that fits and is faster."""
    choices = {step: Planner([step], limit, rate).best().choices[step] for step in dict.fromkeys(steps)}
    few = steps[:3] if len(choices) == 1 else steps  # three alike stand for more
    pairs = Planner(steps, limit, rate, paired=True).plan(Planner(few, limit, rate, paired=True).best().choices)
    plans = [Planner(steps, limit, rate).plan(choices), *([pairs] if pairs.figures.peak <= limit else [])]
    return min(plans, key=lambda each: each.figures.seconds)
