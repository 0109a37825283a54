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
        at: list[dict[str, str]] = [{} for _ in self.steps]  # of each storage that has been made: where it is
        there: list[set[str]] = [set() for _ in self.steps]  # the operators whose results are
        ran: list[dict[str, int]] = [{} for _ in self.steps]
        last: list[dict[bool, int]] = [{} for _ in self.steps]
        present, until = set[int](), dict[tuple[int, str], float]()
        places = [{name: place for place, name in enumerate(step.operators)} for step in self.steps]

        def require(holds: bool, why: str) -> None:
            if not holds:
                raise Unsound(f"action {number}, {kind} {what} of pack {pack}: {why}")

        def moves(before: str, after: str) -> int:
            require(at[pack].get(what) == before, f"it is {at[pack].get(what, 'not made')}, and not {before}")
            at[pack][what] = after
            return step.sizes[what]

        for number, (kind, pack, what) in enumerate(self.actions):
            step = self.steps[pack]
            require((pack in present) != (kind == "enter"), "the pack has not entered, or has twice")
            if kind == "enter":
                require(not ran[pack], "the pack has been here before")
                present.add(pack)
                held += step.entered
            elif kind == "run":
                operator = step.operators[what]
                for read in operator.reads:
                    require(read in there[pack], f"the result of {read} is not there")
                    away = [name for name in step.operators[read].storages if at[pack][name] not in ("here", "leaving")]
                    require(not away, f"{away} of {read} is not here")
                require(what not in there[pack], "its result is there")
                require(not (ran[pack].get(what) and (operator.once or operator.backward)), "it may run only once")
                if operator.once or operator.backward:
                    require(places[pack][what] > last[pack].get(operator.once, -1), "it runs behind a later one")
                    last[pack][operator.once] = places[pack][what]
                for storage in operator.makes:
                    require(at[pack].get(storage, "free") == "free", f"it makes {storage}, which is there")
                    at[pack][storage] = "here"
                    held += step.sizes[storage]
                ran[pack][what] = ran[pack].get(what, 0) + 1
                there[pack].add(what)
                clock += step.seconds.get(what, 0.0)
            elif kind == "free":
                held -= moves("here", "free")
                there[pack] -= {name for name in there[pack] if what in step.operators[name].storages}
            elif kind == "offload":
                out_until = until[pack, what] = max(clock, out_until) + moves("here", "leaving") / self.rate
            elif kind == "reload":
                size = moves("away", "coming")
                held += size
                in_until = until[pack, what] = max(clock, in_until) + size / self.rate
            elif kind in ("release", "await"):
                size = moves("leaving", "away") if kind == "release" else moves("coming", "here")
                held -= size if kind == "release" else 0
                waits = max(0.0, until.pop((pack, what)) - clock)
                clock, stall = clock + waits, stall + waits
            else:
                require(len(ran[pack]) == len(step.operators), f"{sorted({*step.operators} - {*ran[pack]})[:3]} never ran")
                kept = {storage for name in step.outputs for storage in step.operators[name].storages}
                require(there[pack].issuperset(step.outputs), "an output is not there")
                wrong = [name for name, where in at[pack].items() if where != ("here" if name in kept else "free")]
                require(not wrong, f"{wrong[:3]} is left behind, or moves, or is not there")
                held -= step.entered + sum(step.sizes[storage] for storage in kept)
                present.remove(pack)
            peak = max(peak, held)
            require(peak <= limit, f"{peak:,} bytes are held, and the limit is {limit:,}")
        kind, pack, what = "leave", 0, ""
        require(not present and all(ran), "a pack has not left, or never entered")
        return Figures(peak, clock, stall)


def in_turns(orders: Sequence[Order]) -> list[Run]:
    """Return each pack's order behind that of the pack before."""
    return [
        Run(pack, name, backward)
        for pack, order in enumerate(orders)
        for backward, part in enumerate(order)
        for name in part
    ]


def in_pairs(steps: Sequence[Step], orders: Sequence[Order], moves: Sequence[Collection[str]], rate: float) -> list[Run]:
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
