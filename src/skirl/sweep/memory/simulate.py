"""A pack's step as operators and storages, the order in which they run, and for how long each storage is held."""

from collections.abc import Collection, Mapping, Sequence
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
