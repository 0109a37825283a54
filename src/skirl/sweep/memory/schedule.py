"""A schedule of packs: what is done in which order, where transfers begin and are waited for, and what must hold of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

from skirl.sweep.memory.simulate import Order, Run, Step, Timeline


class Action(NamedTuple):
    kind: Literal["enter", "run", "free", "offload", "release", "reload", "await", "leave"]
    """Rows come; an operator runs; a storage is let go, leaves, has left, comes back, is back; results are handed over."""
    pack: int
    what: str = ""
    """The operator or the storage."""


class Figures(NamedTuple):
    peak: int
    """The most bytes that are held at once."""
    seconds: float
    stall: float
    """Seconds of them in which operators wait for the link."""


class Unsound(ValueError):
    """A schedule that must not run."""


@dataclass(frozen=True)
class Schedule:
    steps: Sequence[Step]
    actions: Sequence[Action]
    rate: float
    """Bytes a second of the link, each way."""

    def check(self, limit: float = inf) -> Figures:
        """Go through the actions on a clock that stands for the device and its link. Raise Unsound if an operator reads
        what is not there, runs more often or in another order than it may, a transfer has no other half, something is
        left behind, or the peak is above the limit."""
        peak = held = 0
        clock = stall = out_until = in_until = 0.0
        states = [_State(step) for step in self.steps]
        for number, (kind, pack, what) in enumerate(self.actions):
            state, step = states[pack], self.steps[pack]
            wrong = None if (state.present or kind == "enter") else "the pack is not there"
            if wrong is not None:
                pass
            elif kind == "run":
                wrong = state.run(what)
                held += sum(map(step.sizes.__getitem__, step.operators[what].makes))
                clock += step.seconds.get(what, 0.0)
            elif kind == "enter":
                wrong, state.present, state.entered = "the pack enters twice" if state.entered else None, True, True
                held += step.entered
            elif kind == "leave":
                wrong, state.present = state.leave(), False
                held -= step.entered + sum(map(step.sizes.__getitem__, state.outputs))
            else:
                before, after = _MOVES[kind]
                if state.at.get(what) != before:
                    wrong = f"it is {state.at.get(what, 'not made')}, and not {before}"
                state.at[what], size = after, step.sizes[what]
                if kind == "free":
                    state.results.difference_update(step.aliases[what])
                elif kind == "offload":
                    state.until[what] = out_until = max(clock, out_until) + size / self.rate
                elif kind == "reload":
                    state.until[what] = in_until = max(clock, in_until) + size / self.rate
                else:
                    waits = max(0.0, state.until.pop(what, clock) - clock)
                    clock, stall = clock + waits, stall + waits
                held += {"free": -size, "release": -size, "reload": size}.get(kind, 0)
            peak = max(peak, held)
            if peak > limit:
                wrong = wrong or f"{peak:,} bytes are held, and the limit is {limit:,}"
            if wrong is not None:
                raise Unsound(f"action {number}, {kind} {what} of pack {pack}: {wrong}")
        if any(state.present or not state.entered for state in states):
            raise Unsound("a pack has not left, or never came")
        return Figures(peak, clock, stall)


_MOVES = {
    "free": ("here", "free"), "offload": ("here", "leaving"), "release": ("leaving", "away"),
    "reload": ("away", "coming"), "await": ("coming", "here"),
}  # fmt: skip
"""Where a storage is before an action, and behind it."""


class _State:
    """A pack while its schedule is checked. Methods return what is wrong, or None."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.entered = self.present = False
        self.at = dict[str, str]()
        """Where each storage is that was made."""
        self.until = dict[str, float]()
        self.results = set[str]()
        """The operators whose results are there."""
        self.ran = set[str]()
        self.last = {True: -1, False: -1}
        """The last operators that may run only once: those that draw or write, and the others of the backward."""
        self.outputs = {storage for name in step.outputs for storage in step.operators[name].storages}

    def run(self, name: str) -> str | None:
        operator, at = self.step.operators[name], self.at
        for read in operator.reads:
            if read not in self.results:
                return f"the result of {read} is not there"
            for storage in self.step.operators[read].storages:
                if at[storage] not in ("here", "leaving"):
                    return f"{storage} of {read} is {at[storage]}"
        if name in self.results:
            return "its result is there"
        if operator.once or operator.backward:
            place = self.step.places[name]
            if place <= self.last[operator.once]:
                return "it runs twice, or behind a later one"
            self.last[operator.once] = place
        for storage in operator.makes:
            if at.get(storage, "free") != "free":
                return f"it makes {storage}, which is there"
            at[storage] = "here"
        self.results.add(name)
        self.ran.add(name)
        return None

    def leave(self) -> str | None:
        if len(self.ran) < len(self.step.operators):
            return f"{min({*self.step.operators} - self.ran)} has not run"
        if not self.results.issuperset(self.step.outputs):
            return "an output is not there"
        wrong = [name for name, where in self.at.items() if where != ("here" if name in self.outputs else "free")]
        return f"{wrong[0]} is left behind, moves, or is not there" if wrong else None


def in_turns(orders: Sequence[Order]) -> list[Run]:
    """Return each pack's order behind that of the pack before."""
    return [
        Run(pack, name, backward)
        for pack, order in enumerate(orders)
        for backward, part in enumerate(order)
        for name in part
    ]


def in_pairs(
    steps: Sequence[Step], orders: Sequence[Order], moves: Sequence[Collection[str]], rate: float
) -> list[Run]:
    """Return packs half a step apart: the forward of the next fills the time in which a backward waits for the link."""
    runs = [Run(0, name, False) for name in orders[0].forward]
    for pack, (step, order) in enumerate(zip(steps, orders, strict=True)):
        others = list(orders[pack + 1].forward) if pack + 1 < len(steps) else []
        clock = link = 0.0
        back, others = set[str](), others[::-1]
        for name in order.backward:
            read = {storage for each in step.operators[name].reads for storage in step.operators[each].storages}
            for storage in sorted(read & set(moves[pack]) - back):
                back.add(storage)
                link += step.sizes[storage] / rate
                while clock < link and others:
                    other = others.pop()
                    runs.append(Run(pack + 1, other, False))
                    clock += steps[pack + 1].seconds.get(other, 0.0)
                clock = max(clock, link)
            runs.append(Run(pack, name, True))
            clock += step.seconds.get(name, 0.0)
        runs += [Run(pack + 1, name, False) for name in reversed(others)]
    return runs


def with_transfers(timeline: Timeline, limit: float, rate: float, *, ahead: bool = True) -> Schedule:
    """Return a schedule in which what moves comes back as late as nothing waits for it, and leaves no earlier than it
    has to, as far as the limit allows; without `ahead`, it comes back when it is needed."""
    held, starts, runs = list(timeline.held), timeline.starts, timeline.runs
    before, behind = [[list[Action]() for _ in runs] for _ in range(2)]
    leaves, comes = dict[int, int](), dict[int, int]()

    def grown(place: int, size: int) -> bool:
        fits = held[place] + size <= limit
        held[place] += size if fits else 0
        return fits

    moving = [stay for stay in timeline.stays if stay.gap is not None]
    link = 0.0
    for stay in sorted(moving, key=lambda stay: stay.gap[0]):
        left, back = stay.gap
        link = max(starts[left + 1], link) + stay.size / rate
        place = left + 1
        while place < back and starts[place] < link and grown(place, stay.size):
            place += 1
        leaves[id(stay)] = place
        behind[left].append(Action("offload", stay.pack, stay.storage))
        before[place].append(Action("release", stay.pack, stay.storage))
    link = inf
    for stay in sorted(moving, key=lambda stay: stay.gap[1], reverse=True):
        place = stay.gap[1]
        link = min(starts[place], link) - stay.size / rate
        while ahead and place > leaves[id(stay)] and starts[place] > link and grown(place - 1, stay.size):
            place -= 1
        comes[id(stay)] = place
    for stay in sorted(moving, key=lambda stay: stay.gap[1]):
        before[comes[id(stay)]].append(Action("reload", stay.pack, stay.storage))
    for stay in moving:
        before[stay.gap[1]].append(Action("await", stay.pack, stay.storage))
    for stay in timeline.stays:
        if not stay.handed_over:
            behind[stay.uses[-1]].append(Action("free", stay.pack, stay.storage))
    for pack in range(len(timeline.steps)):
        before[timeline.begins[pack]].insert(0, Action("enter", pack))
        behind[timeline.ends[pack]].append(Action("leave", pack))
    actions = list[Action]()
    for run, first, last in zip(runs, before, behind, strict=True):
        actions += [*first, Action("run", run.pack, run.name), *last]
    return Schedule(timeline.steps, actions, rate)
