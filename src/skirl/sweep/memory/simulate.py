"""A pack's step as operators and storages, the order in which they run, and for how long each storage is held."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Operator:
    name: str
    reads: tuple[str, ...]
    """The operators whose results it takes."""
    storages: tuple[str, ...] = ()
    """The storages that its result is in, without those of the step's inputs."""
    makes: tuple[str, ...] = ()
    """Those that it allocates."""
    backward: bool = False
    once: bool = False
    """True if it draws random numbers, or something writes in place to what it takes or makes: it may not run again."""
    draws: bool = False


class Order(NamedTuple):
    forward: list[str]
    backward: list[str]
    """Operators of the forward that run again are here too."""


@dataclass(frozen=True, eq=False)
class Step:
    """The dense part of one pack's step."""

    operators: Mapping[str, Operator]
    sizes: Mapping[str, int]
    """Bytes of each storage."""
    entered: int
    """Bytes of the rows' outputs: they are there from the first operator to the last."""
    outputs: tuple[str, ...]
    """The operators whose results are handed over at the end."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each operator takes; one that is not in it takes no time."""

    def order(self, again: Collection[str] = ()) -> Order:
        """Return the order of torch's pass when operators run again: each right before the first of the backward that
        takes it, and in the forward only if the forward itself needs it."""
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
        for name in reversed(self.operators):
            operator = self.operators[name]
            if not operator.backward and (name in taken or operator.once):
                forward.append(name)
                taken |= set(operator.reads)
        return Order(forward[::-1], backward)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", {name: place for place, name in enumerate(self.operators)})
        out = {storage for name in self.outputs for storage in self.operators[name].storages}
        taken = {
            storage: None
            for operator in self.operators.values() if operator.backward
            for read in operator.reads if not self.operators[read].backward
            for storage in self.operators[read].storages if storage not in out
        }  # fmt: skip
        object.__setattr__(self, "maps", [storage for storage in taken if self.sizes[storage]])
        aliases: dict[str, list[str]] = {storage: [] for storage in self.sizes}
        for name, operator in self.operators.items():
            for storage in operator.storages:
                aliases[storage].append(name)
        object.__setattr__(self, "aliases", aliases)

    places: Mapping[str, int] = field(init=False, repr=False)
    """Of each operator: its place in the graph."""
    maps: Sequence[str] = field(init=False, repr=False)
    """The storages that the forward leaves for the backward, and that are not handed over."""
    aliases: Mapping[str, Sequence[str]] = field(init=False, repr=False)
    """By storage: the operators whose results are in it."""


def step_of(graph: fx.GraphModule, rows: Sequence[str], seconds: Mapping[str, float] | None = None) -> Step:
    """Read the storages of a captured graph; `rows` names the inputs that are rows' outputs."""
    known, sizes, operators = dict[int, str | None](), dict[str, int](), dict[str, Operator]()
    written = {at for node in graph.graph.nodes for each in _written(node) for at in _storages(each)}
    entered = 0
    for node in graph.graph.nodes:
        own = _storages(node)
        if node.op == "placeholder":
            entered += sum(size for at, size in own.items() if at not in known) if node.name in rows else 0
            known |= dict.fromkeys(own)
        elif node.op == "call_function":
            new = {at: f"{node.name}.{number}" for number, at in enumerate(own) if at not in known}
            known |= new
            sizes |= {name: own[at] for at, name in new.items()}
            draws = _draws(node)
            touched = {at for each in (node, *node.all_input_nodes) for at in _storages(each)}
            operators[node.name] = Operator(
                node.name,
                tuple(each.name for each in node.all_input_nodes if each.op == "call_function"),
                tuple(name for name in map(known.__getitem__, own) if name is not None),
                tuple(new.values()),
                node.meta.get("custom", {}).get("phase") == "backward",
                draws or not written.isdisjoint(touched),
                draws,
            )
    output = graph.graph.output_node()
    outputs = tuple(each.name for each in output.all_input_nodes if each.op == "call_function")
    return Step(operators, sizes, entered, outputs, seconds or {})


def _draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers. Attention without dropout has the tag too."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = cast(torch._ops.OpOverload, node.target)._schema
    given = {a.name: a.default_value for a in schema.arguments} | dict(node.kwargs)
    given |= {a.name: each for a, each in zip(schema.arguments, node.args, strict=False)}
    return given.get("dropout_p") != 0.0


def _storages(node: fx.Node) -> dict[int, int]:
    """Return the bytes of the storages of a node's result, by address."""
    values = [value.untyped_storage() for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in values}


def _written(node: fx.Node) -> list[fx.Node]:
    """Return what a node writes to in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [*zip(schema.arguments, node.args, strict=False), *((a, node.kwargs.get(a.name)) for a in schema.arguments)]
    return [each for a, each in given if a.is_write and isinstance(each, fx.Node)]


class Run(NamedTuple):
    pack: int
    name: str
    backward: bool


@dataclass
class Stay:
    """The time that a storage is held: from the first to the last of the places in a schedule's order that use it."""

    pack: int
    storage: str
    size: int
    uses: list[int]
    gap: tuple[int, int] | None = None
    """The last place of the forward and the first of the backward between which it is somewhere else."""
    handed_over: bool = False


class Timeline:
    """Who runs when, and what is held meanwhile."""

    def __init__(self, steps: Sequence[Step], runs: Sequence[Run], moves: Sequence[Collection[str]]) -> None:
        self.steps, self.runs = steps, runs
        self.ends = {run.pack: place for place, run in enumerate(runs)}
        self.begins = {run.pack: place for place, run in reversed([*enumerate(runs)])}
        self.starts = [0.0]
        """When each run would start if none waited, and behind the last one its end."""
        for run in runs:
            self.starts.append(self.starts[-1] + steps[run.pack].seconds.get(run.name, 0.0))
        self.stays = [*self._stays(moves)]
        self.held = [0] * (len(runs) + 1)
        """Bytes in each run, if what moves leaves at once and comes back when it is needed."""
        for pack, step in enumerate(steps):
            self._add(self.begins[pack], self.ends[pack], step.entered)
        for stay in self.stays:
            before, behind = stay.gap or (stay.uses[-1], None)
            self._add(stay.uses[0], before, stay.size)
            if behind is not None:
                self._add(behind, stay.uses[-1], stay.size)
        for place in range(len(runs)):
            self.held[place + 1] += self.held[place]

    def _add(self, first: int, last: int, size: int) -> None:
        self.held[first] += size
        self.held[last + 1] -= size

    def _stays(self, moves: Sequence[Collection[str]]) -> Iterator[Stay]:
        here, of_value = dict[tuple[int, str], Stay](), dict[tuple[int, str], list[Stay]]()
        for place, (pack, name, backward) in enumerate(self.runs):
            step = self.steps[pack]
            operator = step.operators[name]
            for storage in operator.makes:
                if (pack, storage) in here:
                    yield here[pack, storage]
                here[pack, storage] = Stay(pack, storage, step.sizes[storage], [])
            of_value[pack, name] = [here[pack, storage] for storage in operator.storages]
            for stay in [*of_value[pack, name], *(s for read in operator.reads for s in of_value[pack, read])]:
                if backward and stay.gap is None and stay.storage in moves[pack] and stay.uses:
                    stay.gap = stay.uses[-1], place
                stay.uses.append(place)
        for pack, step in enumerate(self.steps):
            for stay in (stay for name in step.outputs for stay in of_value[pack, name]):
                stay.uses.append(self.ends[pack])
                stay.handed_over = True
        yield from here.values()

    @property
    def peak(self) -> int:
        return max(self.held)
