"""A pack's step as operators and storages, the order in which they run, and for how long each storage is held."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
    """Whether it draws random numbers."""
    once: bool = False
    """Whether it draws, or something writes in place to what it takes or makes: then it may not run again."""


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
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each operator takes; one that is not in it takes no time."""

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
    written = {at for node in graph.graph.nodes for each in _written(node) for at in _storages(each)}
    known, sizes, operators, entered = dict[int, str | None](), dict[str, int](), dict[str, Operator](), 0
    for node in graph.graph.nodes:
        own = _storages(node)
        if node.op == "placeholder":
            entered += sum(own[at] for at in own.keys() - known.keys()) if node.name in rows else 0
            known |= dict.fromkeys(own)
        elif node.op == "call_function":
            new = {at: f"{node.name}.{number}" for number, at in enumerate(own) if at not in known}
            known |= new
            sizes |= {name: own[at] for at, name in new.items()}
            reads = [each for each in node.all_input_nodes if each.op == "call_function"]
            touched = {at for each in (node, *node.all_input_nodes) for at in _storages(each)}
            operators[node.name] = Operator(
                tuple(each.name for each in reads),
                tuple(storage for at in own if (storage := known[at]) is not None),
                tuple(new.values()),
                node.meta.get("custom", {}).get("phase") == "backward",
                draws := _draws(node),
                draws or not written.isdisjoint(touched),
            )
    outputs = [each.name for each in graph.graph.output_node().all_input_nodes if each.op == "call_function"]
    return Step(operators, sizes, entered, outputs)


def _storages(node: fx.Node) -> dict[int, int]:
    """Return the bytes of the storages of a node's result, by address."""
    values = [value.untyped_storage() for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in values}


def _arguments(node: fx.Node) -> list[tuple[torch.Argument, object]]:
    schema = getattr(node.target, "_schema", None)
    named = [] if schema is None else [(a, node.kwargs.get(a.name, a.default_value)) for a in schema.arguments]
    return [(a, node.args[at] if at < len(node.args) else given) for at, (a, given) in enumerate(named)]


def _written(node: fx.Node) -> list[fx.Node]:
    return [given for a, given in _arguments(node) if a.is_write and isinstance(given, fx.Node)]


def _draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers. Attention without dropout has the tag too."""
    tagged = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return tagged and not any(a.name == "dropout_p" and given == 0.0 for a, given in _arguments(node))


class Run(NamedTuple):
    pack: int
    name: str
    backward: bool


@dataclass
class Stay:
    """The time for which a storage is held: places in the order of runs, the first that makes it and all that use it."""

    pack: int
    storage: str
    size: int
    uses: list[int] = field(default_factory=list)
    gap: tuple[int, int] | None = None
    """The last use of the forward and the first of the backward, between which it is on the host."""


class Timeline:
    """Who runs when, and what is held meanwhile."""

    def __init__(self, steps: Sequence[Step], runs: Sequence[Run], moves: Sequence[Collection[str]]) -> None:
        self.steps, self.runs = steps, runs
        self.ends = {run.pack: place for place, run in enumerate(runs)}
        self.begins = {run.pack: len(runs) - 1 - place for place, run in enumerate(reversed(runs))}
        self.starts = [0.0]
        """When each run would start if none waited, and behind the last one its end."""
        for run in runs:
            self.starts.append(self.starts[-1] + steps[run.pack].seconds.get(run.name, 0.0))
        self.stays = [*self._stays(moves)]
        self.held = [0] * (len(runs) + 1)
        """Bytes in each run, if what moves leaves at once and comes back when it is used."""
        spans = [(self.begins[pack], self.ends[pack], step.entered) for pack, step in enumerate(steps)]
        for stay in self.stays:
            left, back = stay.gap or (stay.uses[0], stay.uses[0] + 1)
            spans += [(stay.uses[0], left, stay.size), (back, stay.uses[-1], stay.size)]
        for first, last, size in spans:
            self.held[first] += size
            self.held[last + 1] -= size
        for place in range(len(runs)):
            self.held[place + 1] += self.held[place]

    def _stays(self, moves: Sequence[Collection[str]]) -> Iterator[Stay]:
        here, of_result = dict[tuple[int, str], Stay](), dict[tuple[int, str], list[Stay]]()
        for place, (pack, name, backward) in enumerate(self.runs):
            step = self.steps[pack]
            operator = step.operators[name]
            for storage in operator.makes:
                if (pack, storage) in here:
                    yield here[pack, storage]
                here[pack, storage] = Stay(pack, storage, step.sizes[storage])
            of_result[pack, name] = [here[pack, storage] for storage in operator.storages]
            for each in (name, *operator.reads):
                for stay in of_result[pack, each]:
                    if backward and stay.gap is None and stay.uses and stay.storage in moves[pack]:
                        stay.gap = stay.uses[-1], place
                    stay.uses.append(place)
        for pack, step in enumerate(self.steps):
            for stay in (stay for name in step.outputs for stay in of_result[pack, name]):
                stay.uses.append(self.ends[pack])
        yield from here.values()
