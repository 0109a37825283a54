"""A pack's step as operators and storages, and a schedule of packs: in which order what is done, where transfers begin and
are waited for, and what must hold of it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operator:
    reads: tuple[str, ...]
    """The operators whose results it takes."""
    storages: tuple[str, ...] = ()
    """The storages that its result is in, without those of the step's inputs."""
    makes: tuple[str, ...] = ()
    """Those that it allocates."""
    backward: bool = False
    draws: bool = False
    once: bool = False
    """Whether it draws, or takes or makes what an operator that writes in place does: then it may not run again."""


class Order(NamedTuple):
    forward: list[str]
    backward: list[str]
    """With operators of the forward that run again."""


@dataclass(eq=False)
class Step:
    """The dense part of one pack's step."""

    operators: Mapping[str, Operator]
    sizes: Mapping[str, int]
    """Bytes of each storage."""
    entered: int
    """Bytes of the rows' outputs: they are there from the first operator to the last."""
    outputs: Sequence[str]
    """The operators whose results are handed over at the end."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each operator takes; one that is not in it takes no time."""
    times: dict[str, list[float]] = field(default_factory=dict)
    """What its runs took, while it has no seconds."""

    @cached_property
    def places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.operators)}

    @cached_property
    def aliases(self) -> dict[str, list[str]]:
        """By storage: the operators whose results are in it."""
        return {s: [name for name, operator in self.operators.items() if s in operator.storages] for s in self.sizes}

    @cached_property
    def handed_over(self) -> set[str]:
        return {storage for name in self.outputs for storage in self.operators[name].storages}

    @cached_property
    def maps(self) -> list[str]:
        """The storages that the forward leaves for the backward, the largest first, without those handed over."""
        of_backward = [operator for operator in self.operators.values() if operator.backward]
        reads = [self.operators[read] for operator in of_backward for read in operator.reads]
        taken = dict.fromkeys(storage for read in reads if not read.backward for storage in read.storages)
        found = [storage for storage in taken if self.sizes[storage] and storage not in self.handed_over]
        return sorted(found, key=self.sizes.__getitem__, reverse=True)

    def order(self, again: Collection[str] = ()) -> Order:
        """Return the order, as that of torch's pass, if operators run again: each right before the first of the backward
        that takes it, and in the forward only if the forward needs it."""
        backward, done = list[str](), set[str]()
        for name, operator in self.operators.items():
            if operator.backward:
                missing, stack = set[str](), [*operator.reads]
                while stack:
                    if (read := stack.pop()) in again and read not in done | missing:
                        missing.add(read)
                        stack += self.operators[read].reads
                backward += [*sorted(missing, key=self.places.__getitem__), name]
                done |= missing
        taken = {read for name in backward for read in self.operators[name].reads} - set(again) | set(self.outputs)
        forward = list[str]()
        for name in reversed([*self.operators]):
            operator = self.operators[name]
            if not operator.backward and (name in taken or operator.once):
                forward.insert(0, name)
                taken |= set(operator.reads)
        return Order(forward, backward)


def step_of(graph: fx.GraphModule, rows: Collection[str]) -> Step:
    """Read a captured graph, in which these inputs are rows' outputs."""

    def touched(node: fx.Node) -> set[int]:
        return {at for each in (node, *node.all_input_nodes) for at in _storages(each)}

    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    in_place = [node for node in nodes if getattr(getattr(node.target, "_schema", None), "is_mutable", False)]
    written = {at for node in in_place for at in touched(node)}
    known, sizes, operators, entered = dict[int, str | None](), dict[str, int](), dict[str, Operator](), 0
    for node in nodes:
        own = _storages(node)
        if node.op != "call_function":
            entered += sum(own[at] for at in own.keys() - known.keys()) if node.name in rows else 0
            known |= dict.fromkeys(own)
            continue
        new = {at: f"{node.name}.{number}" for number, at in enumerate(own) if at not in known}
        known |= new
        sizes |= {name: own[at] for at, name in new.items()}
        draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        operators[node.name] = Operator(
            tuple(each.name for each in node.all_input_nodes if each.op == "call_function"),
            tuple(storage for at in own if (storage := known[at]) is not None),
            tuple(new.values()),
            node.meta.get("custom", {}).get("phase") == "backward",
            draws,
            draws or not written.isdisjoint(touched(node)),
        )
    outputs = [each.name for each in graph.graph.output_node().all_input_nodes if each.op == "call_function"]
    return Step(operators, sizes, entered, outputs)


def _storages(node: fx.Node) -> dict[int, int]:
    """Return the bytes of the storages of a node's result, by address."""
    values = [value.untyped_storage() for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in values}


class Action(NamedTuple):
    kind: Literal["enter", "run", "free", "offload", "release", "reload", "back", "leave"]
    """Rows come; an operator runs; a storage is let go, leaves, has left, comes, is back; results are handed over."""
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


_MOVES = {
    "free": ("here", "free", -1), "offload": ("here", "leaving", 0), "release": ("leaving", "away", -1),
    "reload": ("away", "coming", 1), "back": ("coming", "here", 0),
}  # fmt: skip
"""Where a storage is before an action and behind it, and whether its bytes come or go."""


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
        clock = stall = 0.0
        packs, link = [_Checked(step) for step in self.steps], {"offload": 0.0, "reload": 0.0}
        for number, (kind, at, what) in enumerate(self.actions):
            pack, step = packs[at], self.steps[at]
            sound = pack.present == (kind != "enter")
            if kind == "run":
                sound = sound and pack.runs(what)
                held += sum(map(step.sizes.__getitem__, step.operators[what].makes))
                clock += step.seconds.get(what, 0.0)
            elif kind == "enter":
                sound, pack.present = sound and not pack.ran, True
                held += step.entered
            elif kind == "leave":
                sound, pack.present = sound and pack.is_done(), False
                held -= step.entered + sum(map(step.sizes.__getitem__, step.handed_over))
            else:
                before, after, sign = _MOVES[kind]
                sound, pack.where[what] = sound and pack.where.get(what) == before, after
                held += sign * step.sizes[what]
                if kind == "free":
                    pack.results.difference_update(step.aliases[what])
                elif kind in link:
                    pack.until[what] = link[kind] = max(clock, link[kind]) + step.sizes[what] / self.rate
                else:
                    waits = max(0.0, pack.until.get(what, 0.0) - clock)
                    clock, stall = clock + waits, stall + waits
            peak = max(peak, held)
            if not sound or peak > limit:
                raise Unsound(
                    f"action {number} is wrong, {kind} {what} of pack {at}; {held:,} bytes are held of {limit:,}"
                )
        if any(pack.present or not pack.ran for pack in packs):
            raise Unsound("a pack has not left, or never came")
        return Figures(peak, clock, stall)


class _Checked:
    def __init__(self, step: Step) -> None:
        self.step, self.present = step, False
        self.where, self.until = dict[str, str](), dict[str, float]()
        self.results, self.ran = set[str](), set[str]()
        self.last = {True: -1, False: -1}
        """The last operators that may run only once: those that draw or write, and the others of the backward."""

    def runs(self, name: str) -> bool:
        operator, place = self.step.operators[name], self.step.places[name]
        read = [storage for each in operator.reads for storage in self.step.operators[each].storages]
        if not self.results.issuperset(operator.reads) or any(self.where[s] not in ("here", "leaving") for s in read):
            return False
        if name in self.results or any(self.where.get(storage, "free") != "free" for storage in operator.makes):
            return False
        if operator.once or operator.backward:
            if place <= self.last[operator.once]:
                return False
            self.last[operator.once] = place
        self.where |= dict.fromkeys(operator.makes, "here")
        self.results.add(name)
        self.ran.add(name)
        return True

    def is_done(self) -> bool:
        where = {storage: where for storage, where in self.where.items() if where != "free"}
        all_ran = len(self.ran) == len(self.step.operators) and self.results.issuperset(self.step.outputs)
        return all_ran and where == dict.fromkeys(self.step.handed_over, "here")


class Run(NamedTuple):
    pack: int
    name: str
    backward: bool


def in_turns(orders: Sequence[Order]) -> list[Run]:
    """Return each pack's order behind that of the pack before."""
    parts = [(pack, backward, part) for pack, order in enumerate(orders) for backward, part in enumerate(order)]
    return [Run(pack, name, bool(backward)) for pack, backward, part in parts for name in part]


def in_pairs(orders: Sequence[Order]) -> list[Run]:
    """Return packs half a step apart: the forward of the next, whose memory rises, runs beside a backward, whose memory
    falls."""
    runs = [Run(0, name, False) for name in orders[0].forward]
    for pack, order in enumerate(orders):
        beside = orders[pack + 1].forward if pack + 1 < len(orders) else []
        own = [((place + 1) / len(order.backward), Run(pack, name, True)) for place, name in enumerate(order.backward)]
        others = [(place / len(beside), Run(pack + 1, name, False)) for place, name in enumerate(beside)]
        runs += [run for _, run in sorted([*others, *own], key=lambda each: each[0])]
    return runs


@dataclass
class Stay:
    """The time for which a storage is held: places in the order of runs, the first that makes it and all that use it."""

    pack: int
    storage: str
    size: int
    uses: list[int] = field(default_factory=list)
    gap: tuple[int, int] | None = None
    """The last use of the forward and the first of the backward, between which it is on the host."""


def stays(steps: Sequence[Step], runs: Sequence[Run], moves: Sequence[Collection[str]]) -> Iterator[Stay]:
    """Yield for how long each storage is held, if what moves leaves at once and comes back when it is used."""
    here, of_result, ends = dict[tuple[int, str], Stay](), dict[tuple[int, str], list[Stay]](), dict[int, int]()
    for place, (pack, name, backward) in enumerate(runs):
        step, ends[pack] = steps[pack], place
        operator = step.operators[name]
        for storage in operator.makes:
            if (pack, storage) in here:
                yield here[pack, storage]
            here[pack, storage] = Stay(pack, storage, step.sizes[storage])
        of_result[pack, name] = [here[pack, storage] for storage in operator.storages]
        for stay in (stay for each in (name, *operator.reads) for stay in of_result[pack, each]):
            if backward and stay.gap is None and stay.uses and stay.storage in moves[pack]:
                stay.gap = stay.uses[-1], place
            stay.uses.append(place)
    for pack, step in enumerate(steps):
        for stay in (stay for name in step.outputs for stay in of_result[pack, name]):
            stay.uses.append(ends[pack])
    yield from here.values()


def with_transfers(
    steps: Sequence[Step], runs: Sequence[Run], moves: Sequence[Collection[str]], limit: float, rate: float
) -> Schedule:
    """Return a schedule in which what moves is waited for as late, and comes back as early, as nothing has to wait, if the
    limit allows."""
    before, behind = [[list[Action]() for _ in runs] for _ in range(2)]
    starts = [*accumulate((steps[run.pack].seconds.get(run.name, 0.0) for run in runs), initial=0.0)]
    all_stays, changes = [*stays(steps, runs, moves)], [0] * (len(runs) + 1)
    spans = list[tuple[int, int, int]]()
    for pack, step in enumerate(steps):
        own = [place for place, run in enumerate(runs) if run.pack == pack]
        before[own[0]].append(Action("enter", pack))
        behind[own[-1]].append(Action("leave", pack))
        spans.append((own[0], own[-1], step.entered))
    for stay in all_stays:
        left, back = stay.gap or (stay.uses[0], stay.uses[0] + 1)
        spans += [(stay.uses[0], left, stay.size), (back, stay.uses[-1], stay.size)]
        if stay.storage not in steps[stay.pack].handed_over:
            behind[stay.uses[-1]].insert(0, Action("free", stay.pack, stay.storage))
    for first, last, size in spans:
        changes[first] += size
        changes[last + 1] -= size
    held = [*accumulate(changes)]

    def grown(place: int, size: int) -> bool:
        fits = held[place] + size <= limit
        held[place] += size if fits else 0
        return fits

    moving, link = sorted((*stay.gap, stay.pack, stay.storage, stay.size) for stay in all_stays if stay.gap), 0.0
    gone, comes = dict[tuple[int, str], int](), list[tuple[int, int, int, str]]()
    for left, back, pack, storage, size in moving:
        link, place = max(starts[left + 1], link) + size / rate, left + 1
        while place < back and starts[place] < link and grown(place, size):
            place += 1
        gone[pack, storage] = place
        behind[left].append(Action("offload", pack, storage))
        before[place].append(Action("release", pack, storage))
    link = inf
    for _, back, pack, storage, size in sorted(moving, key=lambda each: each[1], reverse=True):
        link, place = min(starts[back], link) - size / rate, back
        while place > gone[pack, storage] and starts[place] > link and grown(place - 1, size):
            place -= 1
        comes.append((place, back, pack, storage))
    for place, back, pack, storage in reversed(comes):
        before[place].append(Action("reload", pack, storage))
        before[back].append(Action("back", pack, storage))
    runs_of = [[Action("run", run.pack, run.name)] for run in runs]
    return Schedule(steps, [each for parts in zip(before, runs_of, behind) for part in parts for each in part], rate)
